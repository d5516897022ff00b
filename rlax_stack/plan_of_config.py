"""From a config to a report: the programs of the learner compiled, its memory, traffic and time, and what workers
need.
"""

import resource
from typing import Any

import jax.numpy as jnp

from rlax_stack import assembly
from rlax_stack.config import RunConfig, to_plain
from rlax_stack.learner.learner import LearnerSettings
from rlax_stack.learner.precision import resolve_compute_dtype
from rlax_stack.models.config import ModelConfig
from rlax_stack.planning import cost_model, learner_programs
from rlax_stack.planning.learner_programs import OutOfMemory, ProgramFigures, StateBytes
from rlax_stack.planning.report import Line, Report, gib, seconds
from rlax_stack.planning.topologies import Topology
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.sharding import make_mesh

_COUNTED, _COMPILED, _MODELLED = 'counted', 'compiled', 'modelled, not measured'


def make_plan(config: RunConfig, model: ModelConfig, topology: Topology) -> Report:
  """The plan of a config on a topology.

  Args:
    config: checked by config_rules; its mesh must take all devices.
    model: shape of the model.
    topology: where the learner runs; workers run on single devices of its kind.

  Raises:
    ConfigError: a mesh that the devices or the model do not divide over.
  """
  backend = 'cpu' if topology.compiled_for == 'virtual CPU' else 'tpu'
  dtype = jnp.bfloat16 if config.model.compute_dtype == 'auto' else None
  dtype = dtype or resolve_compute_dtype(config.model.compute_dtype, backend=backend)
  settings = assembly.learner_settings(config, dtype)
  mesh = make_mesh(to_plain(config.learner.mesh), topology.devices)
  kept = config.rollout.kept_tokens
  batch = learner_programs.abstract_batch(model, settings, mesh, kept)
  held = learner_programs.state_bytes(learner_programs.learner_state(model, settings, mesh), batch)
  rows = settings.rows
  title = (
    f'{config.name} on {topology.name}: {mesh.size} devices, compiled for {topology.compiled_for}; rows of '
    f'{rows.shape.length} tokens, {rows.micro_batch_rows} at once, {rows.max_micro_batches} times'
  )
  capacity = topology.kind.hbm_bytes
  sizes = assembly.engine_sizes(config)
  itemsize = jnp.dtype(dtype).itemsize
  engine = _engine_lines(config, model, sizes, topology, itemsize)
  try:
    train = learner_programs.train_figures(model, settings, mesh, kept)
    score = learner_programs.score_figures(model, settings, mesh, kept)
  except OutOfMemory as error:
    sections = (('memory of a device', _state_lines(held, capacity)), ('rollout', engine))
    return Report(title=title, sections=sections, summary=_misfit(held, capacity, str(error)))
  return _report(title, config, model, settings, topology, held, train, score, engine)


def _report(
  title: str,
  config: RunConfig,
  model: ModelConfig,
  settings: LearnerSettings,
  topology: Topology,
  held: StateBytes,
  train: ProgramFigures,
  score: ProgramFigures,
  engine: tuple[Line, ...],
) -> Report:
  kind, count = topology.kind, len(topology.devices)
  used = train.argument_bytes + train.temporary_bytes
  free = 1 - used / kind.hbm_bytes
  times = cost_model.step_time(train, kind, count)
  scoring = cost_model.step_time(score, kind, count)
  passes = int('anchor' in settings.objective.tags) + int(settings.scores_proximal)
  step_s = settings.updates_per_batch * times.serial_s + passes * scoring.serial_s
  needed = _needed_flops(config, model) * settings.updates_per_batch
  mfu = needed / (count * kind.matmul_flops * step_s)
  time = (
    Line('computing', seconds(times.compute_s), f"{_MODELLED}: at the maker's rate"),
    Line('sending', seconds(times.send_s), f'{_MODELLED}: over one pair of links'),
    Line('scoring pass', seconds(scoring.serial_s), f'{_MODELLED}, {passes} a step'),
    Line('step, nothing at once', seconds(step_s), _MODELLED),
    Line('step, all at once', seconds(step_s - times.serial_s + times.overlapped_s), _MODELLED),
    Line('model-FLOP utilisation', f'{mfu:.1%}', f'{_MODELLED}: needed FLOPs, nothing at once'),
  )
  fleet = _fleet_lines(config, model, settings, topology, step_s)
  summary = {
    'fits': free >= 0,
    'hbm_free_fraction': round(free, 4),
    'modelled_step_s': float(f'{step_s:.4g}'),
    'modelled_mfu': round(mfu, 4),
    'devices': count,
    'compiled_for': topology.compiled_for,
    'row_length': settings.rows.shape.length,
    'compile_s': round(train.compile_s + score.compile_s, 1),
    'peak_host_gib': round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
  }
  if free < 0:
    summary |= _cure(held, kind.hbm_bytes) | {'reason': f'the step needs {gib(used)} of a device'}
  sections = (
    ('memory of a device', _memory_lines(held, train, score, kind.hbm_bytes)),
    ('work of a train step', _work_lines(train, needed)),
    ('time', time),
    ('rollout', engine),
    ('fleet', fleet),
  )
  return Report(title=title, sections=sections, summary=summary)


def _memory_lines(
  held: StateBytes, train: ProgramFigures, score: ProgramFigures, capacity: float
) -> tuple[Line, ...]:
  used = train.argument_bytes + train.temporary_bytes
  free = 1 - used / capacity
  return (
    *_state_lines(held, capacity),
    Line('temporaries of the train step', gib(train.temporary_bytes), _COMPILED),
    Line('temporaries of scoring', gib(score.temporary_bytes), _COMPILED),
    Line('used by the train step', gib(used), _COMPILED),
    Line('free', f'{free:.1%}', _COMPILED),
  )


def _work_lines(train: ProgramFigures, needed: float) -> tuple[Line, ...]:
  return (
    Line(
      'FLOPs of a step', f'{train.flops:.4g}', f'{_COUNTED}, recomputation and padding included'
    ),
    Line(
      'FLOPs that are needed',
      f'{needed:.4g}',
      f'{_COUNTED}: no recomputation, full prompts and samples',
    ),
    Line(
      'products on a device', f'{train.counts.product_flops:.4g}', f'{_COMPILED}, kernels left out'
    ),
    *(
      Line(
        f'{name} sent by a device', gib(sent), f'{_COMPILED}, {train.counts.calls[name]:.0f} calls'
      )
      for name, sent in train.counts.sent_bytes.items()
      if sent
    ),
  )


def _state_lines(held: StateBytes, capacity: float) -> tuple[Line, ...]:
  return (
    Line('capacity', gib(capacity), "the maker's"),
    Line('parameters', gib(held.parameters), _COUNTED),
    Line('optimizer', gib(held.optimizer), _COUNTED),
    Line('critic, averages and the like', gib(held.others), _COUNTED),
    Line('batch', gib(held.batch), _COUNTED),
  )


def _needed_flops(config: RunConfig, model: ModelConfig) -> float:
  rollout = config.rollout
  groups, group = rollout.groups_per_step, rollout.group_size
  prompt, sample = rollout.max_prompt_tokens, rollout.max_tokens
  pairs = prompt**2 / 2 + group * sample * (prompt + sample / 2)
  return groups * cost_model.model_flops(
    model, tokens=prompt + group * sample, targets=group * sample, pairs=pairs
  )


def _engine_lines(
  config: RunConfig, model: ModelConfig, sizes: EngineConfig, topology: Topology, itemsize: int
) -> tuple[Line, ...]:
  held, capacity = cost_model.engine_bytes(model, sizes, itemsize), topology.kind.hbm_bytes
  step = cost_model.decode_step_s(
    model, sizes, topology.kind, group_size=config.rollout.group_size, itemsize=itemsize
  )
  fits = 'fits one device' if held.total <= capacity else 'DOES NOT FIT one device'
  return (
    Line('weights, for prefill and decode', gib(held.weights), _COUNTED),
    Line('KV of prompts', gib(held.prefix_kv), _COUNTED),
    Line('KV of samples', gib(held.suffix_kv), _COUNTED),
    Line('an engine in all', gib(held.total), f'{_COUNTED}: {fits}'),
    Line('decode step of full slots', seconds(step), f"{_MODELLED}: reads at the maker's rate"),
    Line('tokens of a worker', f'{sizes.slots / step:.4g} /s', _MODELLED),
  )


def _fleet_lines(
  config: RunConfig,
  model: ModelConfig,
  settings: LearnerSettings,
  topology: Topology,
  step_s: float,
) -> tuple[Line, ...]:
  dcn_bytes_s, price = config.plan.dcn_gb_s * 1e9, config.plan.price
  itemsize = jnp.dtype(settings.forward.compute_dtype).itemsize
  rollout, sizes = config.rollout, assembly.engine_sizes(config)
  sampled = rollout.groups_per_step * rollout.group_size * rollout.max_tokens
  decode = cost_model.decode_step_s(
    model, sizes, topology.kind, group_size=rollout.group_size, itemsize=itemsize
  )
  workers = sampled / step_s * decode / sizes.slots
  weights = cost_model.num_parameters(model) * itemsize
  lines = [
    Line('weights on the wire', gib(weights), _COUNTED),
    Line(
      'time to publish them',
      seconds(weights / dcn_bytes_s),
      f'{_MODELLED}: at {dcn_bytes_s / 1e9:g} GB/s',
    ),
    Line(
      'single-device workers',
      f'{workers:.1f}',
      f'{_MODELLED}: to keep the learner busy with longest samples',
    ),
  ]
  if price:
    chips = len(topology.devices) / topology.kind.per_chip
    cost = chips * price * step_s / 3600
    lines.append(
      Line(
        'price of a step', f'{cost:.4g}', f'{_MODELLED}: learner alone, {price:g} a chip and hour'
      )
    )
  return tuple(lines)


def _cure(held: StateBytes, capacity: float) -> dict[str, Any]:
  """Which knob to turn."""
  if held.parameters + held.optimizer + held.others > capacity:
    return {'cure': 'the state alone exceeds a device: raise config.learner.mesh.fsdp or tensor'}
  return {
    'cure': 'the state fits, the rows do not: lower config.learner.micro_batch_tokens or row_length, set '
    'config.learner.remat=layer or offload_layer, or raise config.learner.mesh.tensor'
  }


def _misfit(held: StateBytes, capacity: float, reason: str) -> dict[str, Any]:
  """The summary where the compiler gave up."""
  state = held.parameters + held.optimizer + held.others
  fraction = min(0.0, round(1 - state / capacity, 4))
  return {'fits': False, 'hbm_free_fraction': fraction, 'reason': reason} | _cure(held, capacity)
