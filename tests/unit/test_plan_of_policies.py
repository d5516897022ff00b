"""Plans of several policies: the state of each lies beside the step of the others."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from configs import base
from rlax_stack import config_rules, plan_of_policies
from rlax_stack.config import from_config_dict
from rlax_stack.errors import ConfigError
from rlax_stack.models.shapes import SHAPES
from rlax_stack.plan_of_config import make_plan, planned_dtype
from rlax_stack.plan_of_policies import Held, held_bytes, less_shared, plan_policies
from rlax_stack.planning.cost_model import num_parameters
from rlax_stack.planning.report import Line, Report, gib
from rlax_stack.planning.topologies import KINDS, NOTHING_BESIDE, Beside, Topology
from rlax_stack.role_config import policy_configs

_TINY = dataclasses.replace(
  SHAPES['smollm2_135m'], num_layers=2, vocab_size=512, hidden_size=64, intermediate_size=128
)


def _config(own=True, **changes):
  config = base.get_config()
  config.learner.mesh.fsdp = 2
  config.model.compute_dtype = 'float32'
  config.rollout.max_prompt_tokens, config.rollout.max_tokens = 32, 32
  config.rollout.groups_per_step, config.rollout.group_size = 4, 4
  config.roles.kind = 'verifier'
  config.roles.max_prompt_tokens, config.roles.max_tokens = 48, 16
  config.roles.answers = config.roles.verdicts = 2
  if own:
    config.roles.policy, config.policies.judge = 'judge', {}
  for name, value in changes.items():
    config.update_from_flattened_dict({name.replace('__', '.'): value})
  made = from_config_dict(config)
  config_rules.check(made)
  return made


def _topology(**kind):
  return Topology(
    name='two',
    kind=dataclasses.replace(KINDS['h100'], **kind),
    devices=tuple(jax.devices()[:2]),
    compiled_for='virtual CPU',
  )


def _plan(config, topology):
  return plan_policies(config, lambda _: _TINY, topology)


@pytest.fixture
def planned(monkeypatch):
  """What is planned, with a stand-in for the plan of one policy; half a device is free where nothing is beside it."""
  calls = []

  def plan_one(config, model, topology, beside=NOTHING_BESIDE, *, teacher=None):
    assert teacher is None
    calls.append((config, topology, beside))
    misfit = topology.name == 'small' and config.rollout.group_size == 2
    free = -0.1 if misfit else 0.5 - beside.learner / topology.kind.hbm_bytes
    summary = {'fits': free >= 0, 'hbm_free_fraction': free, 'engine_fits': True}
    summary |= {'modelled_step_s': float(len(calls)), 'modelled_mfu': 0.3 / len(calls)}
    summary |= {} if free >= 0 else {'reason': 'too much', 'cure': 'less'}
    capacity = Line('capacity', '', "the maker's")
    sections = (('memory of a device', (capacity,)),)
    return Report(title=config.name, sections=sections, summary=summary)

  monkeypatch.setattr(plan_of_policies, 'make_plan', plan_one)
  return calls


def test_every_policy_is_planned_beside_the_state_of_the_others(planned):
  config, topology = _config(), _topology()
  made = policy_configs(config)
  first, judge = (held_bytes(each, _TINY, None, topology) for each in made.values())
  norms = (2 * _TINY.num_layers + 1) * _TINY.hidden_size  # not split
  parameters = (num_parameters(_TINY) - norms) / 2 + norms
  for each in (first, judge):
    assert each.learner == pytest.approx(3 * 4 * parameters, abs=32)  # weights and two moments
  report = _plan(config, topology)
  assert [call[0] for call in planned] == list(made.values())
  assert planned[0][2] == Beside(judge.learner, judge.worker)
  assert planned[1][2] == Beside(first.learner, first.worker)
  lines = {(s, line.name): line for s, part in report.sections for line in part}
  assert lines['policies', 'state of policy judge'].value == gib(judge.learner)
  assert lines['judge: memory of a device', 'capacity'].known.endswith('what other policies hold')
  last = json.loads(report.text().splitlines()[-1])
  assert last['fits'] and last['engine_fits'] and set(last['policies']) == {'first', 'judge'}
  assert last['modelled_step_s'] == 3.0 and last['modelled_mfu'] == pytest.approx(0.6 / 3)
  free = [0.5 - each.learner / topology.kind.hbm_bytes for each in (first, judge)]
  assert last['hbm_free_fraction'] == pytest.approx(min(free))
  small = _plan(config, dataclasses.replace(topology, name='small')).summary
  assert (small['fits'], small['reason']) == (False, 'policy judge: too much')
  assert small['cure'] == 'less' and small['hbm_free_fraction'] == -0.1
  with pytest.raises(ConfigError, match='the policies beside the first take .* lower config'):
    _plan(config, _topology(hbm_bytes=0.9 * judge.worker))


def test_weights_that_play_both_roles_are_planned_once(planned):
  config = _config(own=False)
  report = _plan(config, _topology())
  ((wide, _, beside),) = planned
  assert wide == policy_configs(config)[''] and wide.rollout.groups_per_step == 12
  assert tuple(beside) == (0, 0) and 'policies' not in report.summary
  assert planned_dtype(config, _topology()) == jnp.float32
  plain = dataclasses.replace(config, roles=dataclasses.replace(config.roles, kind='none'))
  _plan(plain, _topology())
  assert planned[1] == (plain, planned[0][1], NOTHING_BESIDE)


def test_what_others_hold_is_not_free():
  config, topology = policy_configs(_config())[''], _topology(hbm_bytes=1e9)
  made = make_plan(config, _TINY, topology, Beside(learner=1e9 - 1e6, worker=0.0))
  assert not made.summary['fits'] and made.summary['engine_fits']


def test_frozen_weights_that_two_adapters_read_are_counted_once():
  config = _config(learner__adapter__kind='lora')
  first, judge = policy_configs(config).values()
  held = held_bytes(judge, _TINY, None, _topology())
  norms = (2 * _TINY.num_layers + 1) * _TINY.hidden_size
  parameters = (num_parameters(_TINY) - norms) / 2 + norms
  assert isinstance(held, Held) and held.frozen == 4 * parameters
  assert less_shared(held, first, judge) == Beside(
    held.learner - held.frozen, held.worker - held.frozen_of_worker
  )
  other = dataclasses.replace(judge, model=dataclasses.replace(judge.model, path='x'))
  assert less_shared(held, first, other) == Beside(held.learner, held.worker)
  less = _topology().less(5.0)
  assert less.kind.hbm_bytes == _topology().kind.hbm_bytes - 5.0
