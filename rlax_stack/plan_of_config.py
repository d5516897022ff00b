"""From a config to a report: the programs of the learner compiled, its memory, traffic and time, and what workers
need.
"""

import dataclasses
import resource
from typing import Any

import jax.numpy as jnp

from rlax_stack import assembly
from rlax_stack.config import RunConfig, to_plain
from rlax_stack.learner.precision import resolve_compute_dtype
from rlax_stack.learner.scoring import weight_shapes
from rlax_stack.learner.settings import LearnerSettings, check_mixture
from rlax_stack.models.config import ModelConfig
from rlax_stack.plan_search import searched_lines
from rlax_stack.planning import cost_model, learner_programs
from rlax_stack.planning.cost_model import Lengths
from rlax_stack.planning.engine_programs import EngineFigures, engine_figures
from rlax_stack.planning.learner_programs import OutOfMemory, ProgramFigures, Recorded, StateBytes
from rlax_stack.planning.report import Line, Report, gib, seconds
from rlax_stack.planning.topologies import NOTHING_BESIDE, Beside, Topology
from rlax_stack.rollout import engine
from rlax_stack.sharding import make_mesh

_COUNTED, _COMPILED, _MODELLED = 'counted', 'compiled', 'modelled, not measured'


def make_plan(
  config: RunConfig,
  model: ModelConfig,
  topology: Topology,
  beside: Beside = NOTHING_BESIDE,
  *,
  teacher: ModelConfig | None = None,
) -> Report:
  """The plan of a config on a topology; not of its roles (`plan_of_policies`).

  Args:
    config: checked by config_rules; its mesh must take all devices.
    model: shape of the model.
    topology: where the learner runs; workers run on single devices of its kind.
    beside: what is not free of them.
    teacher: shape of the model that config.learner.teacher names.

  Raises:
    ConfigError: a mesh that the devices or the model do not divide over.
  """
  dtype = planned_dtype(config, topology)
  settings = assembly.learner_settings(config, dtype)
  mesh = make_mesh(to_plain(config.learner.mesh), topology.devices)
  sizes = assembly.engine_sizes(config, dtype=dtype)
  check_mixture(model, settings.router, mesh)
  engine.check_mixture(model, sizes)
  recorded = Recorded(sizes.kept_tokens, sizes.record_experts)
  batch = learner_programs.abstract_batch(model, settings, mesh, recorded)
  state = learner_programs.learner_state(model, settings, mesh)
  frozen = learner_programs.frozen_weights(model, settings, mesh)
  scored = learner_programs.scored_weights(model, settings, mesh, teacher)
  held = learner_programs.state_bytes(state, batch, *frozen, scored=scored)
  rows = settings.rows
  title = (
    f'{config.name} on {topology.name}: {mesh.size} devices, compiled for {topology.compiled_for}; rows of '
    f'{rows.shape.length} tokens, {rows.micro_batch_rows} at once, {rows.max_micro_batches} times'
  )
  topology, worker = topology.less(beside.learner), topology.less(beside.worker)
  capacity = topology.kind.hbm_bytes
  try:
    figures = engine_figures(model, sizes, topology.devices[0])
  except OutOfMemory:
    figures = None
  workers = _engine_lines(config, model, worker, jnp.dtype(dtype).itemsize, figures, frozen)
  try:
    train = learner_programs.train_figures(model, settings, mesh, recorded)
    score = learner_programs.score_figures(model, settings, mesh, recorded)
    taught = teacher and learner_programs.teacher_figures(teacher, model, settings, mesh)
  except OutOfMemory as error:
    sections = (('memory of a device', _state_lines(held, capacity)), ('rollout', workers))
    summary = _misfit(held, capacity, str(error))
    report = Report(title=title, sections=sections, summary=summary)
    return _with_engine(report, figures, worker.kind.hbm_bytes)
  report = _report(title, config, model, settings, topology, held, train, score, taught, workers)
  report = _with_engine(report, figures, worker.kind.hbm_bytes)
  if not (config.plan.search and report.summary['fits']):
    return report
  used = _used(held, train)
  searched = searched_lines(config, model, topology, dtype, recorded, used, held.scored)
  sections = (*report.sections, ('largest that fits, one knob at a time', searched))
  return dataclasses.replace(report, sections=sections)


def planned_dtype(config: RunConfig, topology: Topology) -> Any:
  """What a run there would compute in."""
  if config.model.compute_dtype == 'auto':
    return jnp.bfloat16
  backend = 'cpu' if topology.compiled_for == 'virtual CPU' else 'tpu'
  return resolve_compute_dtype(config.model.compute_dtype, backend=backend)


def _with_engine(report: Report, figures: EngineFigures | None, capacity: float) -> Report:
  """The report whose summary says of the engine, too, whether it fits a device."""
  fits = figures is not None and max(figures.decode, figures.prefill) <= capacity
  summary: dict[str, Any] = {'engine_fits': fits}
  if figures is not None:
    summary['engine_hbm_free_fraction'] = round(1 - figures.decode / capacity, 4)
    summary['engine_compile_s'] = round(figures.compile_s, 1)
  return dataclasses.replace(report, summary=report.summary | summary)


def _report(
  title: str,
  config: RunConfig,
  model: ModelConfig,
  settings: LearnerSettings,
  topology: Topology,
  held: StateBytes,
  train: ProgramFigures,
  score: ProgramFigures,
  taught: ProgramFigures | None,
  engine: tuple[Line, ...],
) -> Report:
  kind, count = topology.kind, len(topology.devices)
  used = _used(held, train)
  free = 1 - used / kind.hbm_bytes
  times = cost_model.step_time(train, kind, count)
  scoring = cost_model.step_time(score, kind, count)
  passes = int('anchor' in settings.objective.tags) + int(settings.scores_proximal)
  passes += int(bool(config.learner.teacher_context) and taught is None)
  teacher_s = cost_model.step_time(taught, kind, count).serial_s if taught else 0.0
  step_s = settings.updates_per_batch * times.serial_s + passes * scoring.serial_s + teacher_s
  needed = _needed_flops(config, model) * settings.updates_per_batch
  mfu = needed / (count * kind.matmul_flops * step_s)
  time = (
    Line('computing', seconds(times.compute_s), f"{_MODELLED}: at the maker's rate"),
    Line('sending', seconds(times.send_s), f'{_MODELLED}: over one pair of links'),
    Line('scoring pass', seconds(scoring.serial_s), f'{_MODELLED}, {passes} a step'),
    *([Line('scoring by the teacher', seconds(teacher_s), _MODELLED)] if taught else []),
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
    ('work of a train step', _work_lines(model, train, needed)),
    ('time', time),
    ('rollout', engine),
    ('fleet', fleet),
  )
  return Report(title=title, sections=sections, summary=summary)


def _used(held: StateBytes, train: ProgramFigures) -> float:
  """Bytes of a device in a train step, with what lies there and is no argument of it."""
  return train.argument_bytes + train.temporary_bytes + held.scored


def _memory_lines(
  held: StateBytes, train: ProgramFigures, score: ProgramFigures, capacity: float
) -> tuple[Line, ...]:
  used = _used(held, train)
  free = 1 - used / capacity
  return (
    *_state_lines(held, capacity),
    Line('temporaries of the train step', gib(train.temporary_bytes), _COMPILED),
    Line('temporaries of scoring', gib(score.temporary_bytes), _COMPILED),
    Line('used by the train step', gib(used), _COMPILED),
    Line('free', f'{free:.1%}', _COMPILED),
  )


def _work_lines(model: ModelConfig, train: ProgramFigures, needed: float) -> tuple[Line, ...]:
  return (
    Line('parameters', f'{cost_model.num_parameters(model):.4g}', _COUNTED),
    Line('of them in use for a token', f'{cost_model.active_parameters(model):.4g}', _COUNTED),
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
    Line('trained parameters', gib(held.parameters), _COUNTED),
    *([Line('frozen weights', gib(held.frozen), _COUNTED)] if held.frozen else []),
    Line('optimizer', gib(held.optimizer), _COUNTED),
    Line('critic, averages and the like', gib(held.others), _COUNTED),
    *([Line('anchor and teacher', gib(held.scored), _COUNTED)] if held.scored else []),
    Line('batch', gib(held.batch), _COUNTED),
  )


def _needed_flops(config: RunConfig, model: ModelConfig) -> float:
  rollout = config.rollout
  groups, group = rollout.groups_per_step, rollout.group_size
  prompt, sample = rollout.max_prompt_tokens, rollout.max_tokens
  pairs = prompt**2 / 2 + group * sample * (prompt + sample / 2)
  return groups * cost_model.model_flops(
    model,
    tokens=prompt + group * sample,
    targets=group * sample,
    pairs=pairs,
    weight_gradients=config.learner.adapter.kind == 'none',
  )


def _lengths(config: RunConfig) -> Lengths:
  return Lengths(
    mean=config.plan.mean_tokens or config.rollout.max_tokens, spread=config.plan.spread
  )


def _decode_step_s(
  config: RunConfig, model: ModelConfig, topology: Topology, itemsize: int
) -> float:
  return cost_model.decode_step_s(
    model,
    assembly.engine_sizes(config),
    topology.kind,
    group_size=config.rollout.group_size,
    itemsize=itemsize,
    lengths=_lengths(config),
  )


def _engine_lines(
  config: RunConfig,
  model: ModelConfig,
  topology: Topology,
  itemsize: int,
  figures: EngineFigures | None,
  frozen: tuple[Any, ...],
) -> tuple[Line, ...]:
  """Of one engine on one device; `figures` is None where its programs do not fit."""
  sizes, capacity = assembly.engine_sizes(config), topology.kind.hbm_bytes
  held = cost_model.engine_bytes(model, sizes, itemsize)
  base = learner_programs.whole_bytes(frozen)
  step = _decode_step_s(config, model, topology, itemsize)
  if figures is None:
    programs = (Line('decode and prefill', 'DO NOT FIT', f'{_COMPILED}: {_ENGINE_CURE}'),)
  else:
    programs = (
      Line('used by decode', gib(figures.decode), f'{_COMPILED}: {_fit(figures.decode, capacity)}'),
      Line(
        'used by prefill', gib(figures.prefill), f'{_COMPILED}, without KV, which takes no more'
      ),
    )
  return (
    Line('weights', gib(held.weights), _COUNTED),
    Line('KV of prompts', gib(held.prefix_kv), _COUNTED),
    Line('KV of samples', gib(held.suffix_kv), _COUNTED),
    *([Line('frozen weights, to merge adapters into', gib(base), _COUNTED)] if frozen else []),
    Line(
      'an engine in all',
      gib(held.total + base),
      f'{_COUNTED}: {_fit(held.total + base, capacity)}',
    ),
    *programs,
    Line('decode step of full slots', seconds(step), f"{_MODELLED}: reads at the maker's rate"),
    Line('tokens of a worker', f'{sizes.slots / step:.4g} /s', _MODELLED),
  )


_ENGINE_CURE = (
  'lower config.rollout.slots or kv_fraction, or set rollout.weights=int8 and rollout.kv=int8'
)


def _fit(used: float, capacity: float) -> str:
  return 'fits one device' if used <= capacity else f'DOES NOT FIT one device: {_ENGINE_CURE}'


def _fleet_lines(
  config: RunConfig,
  model: ModelConfig,
  settings: LearnerSettings,
  topology: Topology,
  step_s: float,
) -> tuple[Line, ...]:
  dcn_bytes_s, price = config.plan.dcn_gb_s * 1e9, config.plan.price
  itemsize = jnp.dtype(settings.forward.compute_dtype).itemsize
  rollout, lengths = config.rollout, _lengths(config)
  sampled = rollout.groups_per_step * rollout.group_size * lengths.mean
  decode = _decode_step_s(config, model, topology, itemsize)
  workers = sampled / step_s * decode / rollout.slots
  trained, frozen = weight_shapes(model, settings.forward)
  weights = learner_programs.whole_bytes(trained) * (1.0 if frozen else itemsize / 4)
  lines = [
    Line('adapter on the wire' if frozen else 'weights on the wire', gib(weights), _COUNTED),
    Line(
      'time to publish them',
      seconds(weights / dcn_bytes_s),
      f'{_MODELLED}: at {dcn_bytes_s / 1e9:g} GB/s',
    ),
    Line(
      'single-device workers',
      f'{workers:.1f}',
      f'{_MODELLED}: to keep the learner busy, samples of {lengths.mean:g} tokens on average, spread '
      f'{lengths.spread:g}-fold',
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
  if held.state > capacity:
    return {'cure': 'the state alone exceeds a device: raise config.learner.mesh.fsdp or tensor'}
  return {
    'cure': 'the state fits, the rows do not: lower config.learner.micro_batch_tokens or row_length, set '
    'config.learner.remat=layer or offload_layer, or raise config.learner.mesh.tensor'
  }


def _misfit(held: StateBytes, capacity: float, reason: str) -> dict[str, Any]:
  """The summary where the compiler gave up."""
  fraction = min(0.0, round(1 - held.state / capacity, 4))
  return {'fits': False, 'hbm_free_fraction': fraction, 'reason': reason} | _cure(held, capacity)
