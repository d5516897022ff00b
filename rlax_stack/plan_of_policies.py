"""The plan of a run of several policies: each as if alone, on what the others leave of the devices.

Learners share one mesh, so that the state of every policy lies on each device while one of them steps; a worker has an
engine for every policy. Policies step one after another.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from rlax_stack import assembly
from rlax_stack.config import RunConfig, to_plain
from rlax_stack.errors import ConfigError
from rlax_stack.models.config import ModelConfig
from rlax_stack.plan_of_config import make_plan, planned_dtype
from rlax_stack.planning import cost_model, learner_programs
from rlax_stack.planning.report import Line, Report, gib
from rlax_stack.planning.topologies import Beside, Topology
from rlax_stack.role_config import has_roles, policy_configs, shares_base
from rlax_stack.sharding import make_mesh


def plan_policies(
  config: RunConfig, shape_of: Callable[[str], ModelConfig], topology: Topology
) -> Report:
  """The plan of a config on a topology, that of all its policies.

  Weights that play several roles are planned for the longest groups of any; policies of their own one by one.

  Args:
    config: checked by config_rules.
    shape_of: shape of the model at a path.
    topology: see `make_plan`.

  Raises:
    ConfigError: see `make_plan`; policies that leave another one no memory at all.
  """

  def shapes(each: RunConfig) -> tuple[ModelConfig, ModelConfig | None]:
    path = each.learner.teacher
    return shape_of(each.model.path), shape_of(path) if path else None

  if not has_roles(config):
    model, teacher = shapes(config)
    return make_plan(config, model, topology, teacher=teacher)
  made = policy_configs(config)
  held = {name: held_bytes(each, *shapes(each), topology) for name, each in made.items()}
  reports = {}
  for name, each in made.items():
    others = {n: less_shared(b, each, made[n]) for n, b in held.items() if n != name}
    beside = Beside(*(sum(part) for part in zip(*others.values(), strict=True)))
    if max(beside) >= topology.kind.hbm_bytes:
      raise ConfigError(
        f'the policies beside {name or "the first"} take {gib(beside.learner)} of a device for their state and '
        f'{gib(beside.worker)} for their engines, but it has {gib(topology.kind.hbm_bytes)}. Raise '
        'config.learner.mesh.fsdp, lower config.rollout.slots, or let the first policy play the role.'
      )
    model, teacher = shapes(each)
    reports[name] = make_plan(each, model, topology, beside, teacher=teacher)
  return reports[''] if len(reports) == 1 else _joined(held, reports)


class Held(NamedTuple):
  """Bytes of one policy on a device of the learner and of a worker; frozen weights among them."""

  learner: float
  worker: float
  frozen: float
  frozen_of_worker: float


def held_bytes(
  config: RunConfig, model: ModelConfig, teacher: ModelConfig | None, topology: Topology
) -> Held:
  """What a policy's learner keeps between steps and what its engine takes, known from shapes alone."""
  dtype = planned_dtype(config, topology)
  settings = assembly.learner_settings(config, dtype)
  mesh = make_mesh(to_plain(config.learner.mesh), topology.devices)
  state = learner_programs.learner_state(model, settings, mesh)
  batch = learner_programs.abstract_batch(model, settings, mesh)
  frozen = learner_programs.frozen_weights(model, settings, mesh)
  scored = learner_programs.scored_weights(model, settings, mesh, teacher)
  held = learner_programs.state_bytes(state, batch, *frozen, scored=scored)
  sizes = assembly.engine_sizes(config, dtype=dtype)
  base = learner_programs.whole_bytes(frozen)
  engine = cost_model.engine_bytes(model, sizes, jnp.dtype(dtype).itemsize)
  return Held(held.state, engine.total + base, held.frozen, base)


def less_shared(held: Held, config: RunConfig, other: RunConfig) -> Beside:
  """What a policy takes beside that of `config`: without the frozen weights that both read."""
  if not shares_base(config, other):
    return Beside(held.learner, held.worker)
  return Beside(held.learner - held.frozen, held.worker - held.frozen_of_worker)


def _joined(held: Mapping[str, Held], reports: Mapping[str, Report]) -> Report:
  """One report: sections of every policy under its name, and a summary of them all."""
  names = {name: name or 'first' for name in reports}
  lines = tuple(
    Line(f'state of policy {names[name]}', gib(held[name].learner), 'counted, of a device')
    for name in reports
  )
  sections = [('policies', lines)]
  for name, report in reports.items():
    sections += [
      (f'{names[name]}: {title}', tuple(_less_others(line) for line in part))
      for title, part in report.sections
    ]
  titles = '; '.join(f'{names[name]}: {report.title}' for name, report in reports.items())
  return Report(title=titles, sections=tuple(sections), summary=_summary(names, reports))


def _less_others(line: Line) -> Line:
  """A line of one policy's report: what it calls capacity is what the others leave."""
  if line.name != 'capacity':
    return line
  return dataclasses.replace(line, known="the maker's, less what other policies hold")


def _summary(names: Mapping[str, str], reports: Mapping[str, Report]) -> dict[str, Any]:
  each = {names[name]: report.summary for name, report in reports.items()}
  misfits = {name: summary for name, summary in each.items() if not summary['fits']}
  summary: dict[str, Any] = {
    'fits': not misfits,
    'hbm_free_fraction': min(part['hbm_free_fraction'] for part in each.values()),
  }
  if all('modelled_step_s' in part for part in each.values()):
    seconds = sum(part['modelled_step_s'] for part in each.values())
    worked = sum(part['modelled_step_s'] * part['modelled_mfu'] for part in each.values())
    summary |= {
      'modelled_step_s': float(f'{seconds:.4g}'),
      'modelled_mfu': round(worked / seconds, 4),
    }
  for name, part in misfits.items():
    summary |= {'reason': f'policy {name}: {part["reason"]}', 'cure': part['cure']}
  summary['engine_fits'] = all(part['engine_fits'] for part in each.values())
  return summary | {'policies': each}
