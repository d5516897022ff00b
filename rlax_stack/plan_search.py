"""The largest rows of a config that fit its devices, one knob at a time."""

import dataclasses
from typing import Any, cast

from rlax_stack import assembly
from rlax_stack.config import RunConfig, to_plain
from rlax_stack.models.config import ModelConfig
from rlax_stack.planning import learner_programs
from rlax_stack.planning.learner_programs import OutOfMemory, Recorded
from rlax_stack.planning.report import Line, gib
from rlax_stack.planning.search import LargestFit, largest_fit
from rlax_stack.planning.topologies import Topology
from rlax_stack.sharding import make_mesh, row_shards


def searched_lines(
  config: RunConfig,
  model: ModelConfig,
  topology: Topology,
  dtype: Any,
  recorded: Recorded,
  used: float,
  scored: float,
) -> tuple[Line, ...]:
  """The largest micro-batch and the longest rows that fit.

  Args:
    config: of the run.
    model: shape of the model.
    topology: where the learner runs.
    dtype: of activations.
    recorded: see Recorded.
    used: bytes of a device that the config as it is takes.
    scored: those among them that are no argument of the step.
  """
  rollout, rows = config.rollout, assembly.learner_settings(config, dtype).rows
  whole = rollout.groups_per_step * (
    rollout.max_prompt_tokens + rollout.group_size * rollout.max_tokens
  )
  mesh = to_plain(config.learner.mesh)
  data_parallel, context = row_shards(mesh), mesh['context']

  def used_by(row_length: int, tokens: int) -> float | None:
    learner = dataclasses.replace(
      cast(Any, config.learner),
      row_length=row_length,
      micro_batch_tokens=max(tokens, row_length // context),
    )
    changed = dataclasses.replace(cast(Any, config), learner=learner)
    settings = assembly.learner_settings(changed, dtype)
    devices = make_mesh(to_plain(learner.mesh), topology.devices)
    try:
      figures = learner_programs.train_figures(model, settings, devices, recorded)
    except OutOfMemory:
      return None
    return figures.argument_bytes + figures.temporary_bytes + scored

  start = rows.micro_batch_rows // data_parallel * rows.shape.length // context
  options = {'used': used, 'capacity': topology.kind.hbm_bytes}
  length = rows.shape.length
  batch = largest_fit(
    lambda tokens: used_by(length, tokens),
    start=start,
    most=whole // (data_parallel * context),
    **options,
  )
  longest = largest_fit(
    lambda tokens: used_by(tokens, tokens // context),
    start=length,
    most=whole // data_parallel,
    **options,
  )
  return (
    _found('tokens of a micro-batch on a device', batch),
    _found('tokens of a row', longest),
  )


def _found(name: str, fit: LargestFit) -> Line:
  after = 'nothing is left to put in' if fit.next_used is None else f'{2 * fit.value} do not fit'
  return Line(f'most {name}', f'{fit.value}', f'compiled: {gib(fit.used)}; {after}')
