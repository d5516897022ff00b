"""Configs load, freeze and are refused with the name, the value and the cure."""

import dataclasses
import importlib
import pathlib

import pytest
from ml_collections import ConfigDict

from configs import base
from rlax_stack import config as config_lib
from rlax_stack import config_rules
from rlax_stack.errors import ConfigError
from rlax_stack.models.quantised import KERNEL_KINDS
from rlax_stack.objective_rules import filters, off_policy, resolve_objective
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.quantise import KV_KINDS

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted(
  '.'.join(path.relative_to(ROOT).with_suffix('').parts)
  for path in (ROOT / 'configs').rglob('*.py')
  if path.name != '__init__.py'
)


def make(**changes):
  """The base config with dotted fields changed, frozen and checked."""
  config = base.get_config()
  for path, value in changes.items():
    config.update_from_flattened_dict({path.replace('__', '.'): value})
  frozen = config_lib.from_config_dict(config)
  config_rules.check(frozen)
  return frozen


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_loads_and_validates(name):
  config = importlib.import_module(name).get_config()
  frozen = config_lib.from_config_dict(config)
  if 'gsm8k' in name:
    assert frozen.data.train.kind == 'gsm8k'
  config_rules.check(frozen)
  assert frozen.name == name.rsplit('.', 1)[-1]


def test_values_arrive_frozen_and_typed():
  frozen = make(rollout__temperature=1, eval__pass_at=(1, 2), eval__samples=2, seed=7)
  assert frozen.seed == 7
  assert frozen.rollout.temperature == 1.0 and isinstance(frozen.rollout.temperature, float)
  assert frozen.eval.pass_at == (1, 2)
  assert frozen.rewards.verifiers == {'number': {'weight': 1.0}}
  with pytest.raises(dataclasses.FrozenInstanceError):
    frozen.seed = 8


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'kind': 'lorra'},
      "adapter.kind must be one of none, lora, .* got 'lorra'. Did you mean lora",
    ),
    ({'base': 'int3', 'kind': 'lora'}, "adapter.base must be one of float32, .* got 'int3'"),
    ({'rank': 0, 'kind': 'lora'}, 'adapter.rank must be above 0, got 0'),
    ({'alpha': -1.0}, 'adapter.alpha must be above 0, got -1.0'),
    ({'targets': (), 'kind': 'dora'}, 'adapter.targets is empty'),
    ({'base': 'int4'}, 'adapter.base=int4 is for frozen weights'),
  ],
)
def test_adapters_that_cannot_be(changes, message):
  with pytest.raises(ConfigError, match=message):
    make(**{f'learner__adapter__{name}': value for name, value in changes.items()})


def test_adapters_go_with_a_critic_on_the_policy_only():
  adapted = {'learner__adapter__kind': 'lora', 'learner__adapter__base': 'int4'}
  gae = {'objective__advantage': 'gae(gamma=1, lam=1)'}
  make(**adapted, **gae, objective__critic='shared_trunk')
  with pytest.raises(ConfigError, match='critic=separate trains a whole model of its own'):
    make(**adapted, **gae, objective__critic='separate')


def test_plain_form_is_json_like():
  plain = config_lib.to_plain(make())
  assert plain['eval']['pass_at'] == [1]
  assert plain['data']['eval']['task_options'] == {}
  assert plain['fleet'] == {
    'runtime': 'local',
    'max_staleness': 0,
    'lease_timeout_s': 600.0,
    'batch_timeout_s': 1800.0,
  }


def test_unknown_field_answers_with_the_nearest_name():
  config = base.get_config()
  config.rollout.temprature = 0.5
  with pytest.raises(ConfigError, match=r'config.rollout.temprature. Did you mean temperature\?'):
    config_lib.from_config_dict(config)


def test_missing_and_mistyped_fields_are_named():
  config = base.get_config()
  del config.learner['beta1']
  with pytest.raises(ConfigError, match='config.learner lacks beta1'):
    config_lib.from_config_dict(config)
  raw = base.get_config().to_dict()
  raw['steps'] = 'many'
  with pytest.raises(ConfigError, match="config.steps must be a int, got 'many'"):
    config_lib.from_config_dict(ConfigDict(raw))
  raw['steps'] = True
  with pytest.raises(ConfigError, match='config.steps must be a int, got True'):
    config_lib.from_config_dict(ConfigDict(raw))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'objective__advantage': 'grpo'}, "advantage names no box 'grpo'. There are: group_"),
    (
      {'objective__corrections': ('icepop',), 'objective__ratio': 'sequence'},
      'icepop drops single',
    ),
    ({'objective__corrections': ('auto', 'icepop')}, "mixes 'auto' with others"),
    ({'objective__regularisers': ('kl_anchor', 'kl_anchor')}, 'names a box twice'),
    (
      {'objective__ratio': 'token(base="behaviour")', 'objective__corrections': ('token_tis',)},
      'once more',
    ),
    ({'objective__critic': 'shared'}, "critic names no box 'shared'. There are: shared_trunk, sep"),
    ({'objective__advantage': 'gae'}, 'gae reads the values of a critic.*separate or shared_trunk'),
    ({'objective__critic': 'separate'}, 'group_center does not read its values.*to none'),
    (
      {
        'objective__advantage': 'gae',
        'objective__critic': 'separate(pretrain_updates=100)',
      },
      'pretrain_updates=100 .* leaves no update of the policy',
    ),
    (
      {'objective__advantage': 'gae', 'objective__critic': 'shared_trunk(updates=2)'},
      "shared_trunk has no option 'updates'",
    ),
    (
      {
        'objective__advantage': 'vtrace',
        'objective__critic': 'separate',
        'rollout__top_k': 5,
      },
      'advantage=vtrace.*kept set',
    ),
    (
      {'objective__ratio': 'token(base="behaviour")', 'rollout__top_p': 0.9},
      'ratio=token.*kept set',
    ),
    ({'objective__corrections': ('token_tis',), 'rollout__min_p': 0.1}, 'token_tis.*kept set'),
    ({'learner__learning_rate': float('nan')}, 'learning_rate must be above 0, got nan'),
    ({'rollout__group_size': 1}, 'rollout.group_size=1. Set config.rollout.group_size to 2'),
    (
      {'objective__shaping': ('process_delta',)},
      'process_delta .* holds only number. Add .* step_format',
    ),
    ({'objective__advantage': 'step_std'}, 'step_std of config.objective reads rewards of steps'),
    ({'rollout__top_p': 0.0}, 'top_p must be above 0'),
    ({'rollout__top_p': 0.9, 'fleet__max_staleness': 1}, 'kept set'),
    (
      {'rollout__top_k': 5, 'rollout__kv': 'int8', 'objective__corrections': ()},
      'quantised rollouts.*kept set',
    ),
    (
      {'rollout__top_k': 5, 'fleet__max_staleness': 1},
      r'kept set. Record it with config.rollout.kept_tokens=N \(N ids per token, 5 or more\)',
    ),
    ({'rollout__kept_tokens': 8}, 'kept_tokens=8 records .* all of them are off. Set it to 0'),
    (
      {'rollout__kept_tokens': 8, 'rollout__top_k': 9},
      'kept_tokens=8 has no room for the config.rollout.top_k=9 .* Set it to 9 or more',
    ),
    ({'rollout__kept_tokens': -1}, 'kept_tokens must be 0 or more'),
    (
      {
        'rollout__kept_tokens': 8,
        'rollout__top_p': 0.9,
        'objective__regularisers': ('lp_reg',),
      },
      'lp_reg of config.objective compares .* over the whole vocabulary',
    ),
    ({'rollout__weights': 'int4'}, 'rollout.weights must be one of same, int8, fp8'),
    ({'rollout__groups_in_flight': 7}, 'in_flight=7 cannot fill .*groups_per_step=8. Set it to 8'),
    (
      {'rollout__groups_in_flight': 9},
      'groups_in_flight=9 exceeds the 8 groups .* config.fleet.max_staleness=0',
    ),
    ({'rollout__groups_in_flight': 17, 'fleet__max_staleness': 1}, 'exceeds the 16 groups'),
    (
      {'rollout__draft_weights': 'int8'},
      'draft_weights=int8 proposes .*max_draft=0. Set max_draft',
    ),
    ({'rollout__answer_drafts': 'coupled'}, 'answer_drafts=coupled proposes tokens that nothing'),
    (
      {'rollout__max_draft': 3, 'rollout__draft_weights': 'int8', 'rollout__weights': 'int8'},
      'weights=int8 makes those small already',
    ),
    ({'rollout__draft_rows': 4}, 'draft_weights=none makes none'),
    (
      {
        'rollout__max_draft': 3,
        'rollout__answer_drafts': 'independent',
        'rollout__strategy': 'delethink(chunk=64, carry=32)',
      },
      'answer_drafts=independent goes with samples of one request',
    ),
    ({'rollout__temperature': 0.0}, 'temperature=0 samples every group'),
    ({'rollout__strategy': 'forest'}, "rollout.strategy names no box 'forest'"),
    ({'rollout__strategy': 'tree(roots=3)'}, 'roots=3 must divide config.rollout.group_size=8'),
    ({'rollout__strategy': 'delethink(chunk=8, carry=8)'}, 'carry=8 leaves nothing to sample'),
    ({'rollout__strategy': 'tree', 'rollout__stop_strings': ('x',)}, 'Set .*stop_strings=()'),
    ({'rollout__strategy': 'prefix', 'rollout__presence_penalty': 1.0}, 'Set both to 0'),
    (
      {'rollout__strategy': 'delethink(chunk=64, carry=32)', 'learner__row_length': 600},
      r'max_prompt_tokens \+ 448 = 704 tokens, but config.learner.row_length=600',
    ),
    ({'eval__vote': 'numbers'}, 'eval.vote must be one of none, number.* Did you mean number'),
    ({'learner__row_length': 500}, '= 512 tokens, but config.learner.row_length=500'),
    ({'learner__mesh.data': 0}, 'mesh.data must be 1 or more'),
    ({'learner__mesh.context': 0}, 'mesh.context must be 1 or more'),
    (
      {'learner__mesh.context': 4, 'learner__row_length': 640},
      r'row_length=640 .*mesh.context=4 .*64 x 4 = 256. Set it to 768',
    ),
    ({'learner__mesh.expert': 0}, 'mesh.expert must be 1 or more'),
    ({'learner__router_aux_coef': -0.1}, 'router_aux_coef must be 0 or more, got -0.1'),
    ({'learner__router_z_coef': -1.0}, 'router_z_coef must be 0 or more, got -1.0'),
    ({'learner__warmup_steps': 100}, 'leaves no step'),
    ({'profile__steps': (3, 101)}, 'profile.steps holds 101: steps go from 1 to config.steps=100'),
    ({'learner__optimizer': 'adafacter'}, 'learner.optimizer .* Did you mean adafactor?'),
    ({'learner__optimizer_dtype': 'float16'}, 'Did you mean .*float'),
    ({'learner__momentum': 1.5}, 'momentum must be from 0 to 1'),
    (
      {'learner__optimizer': 'schedule_free', 'learner__decay': 'cosine'},
      'averages weights .* decay=cosine. Set beta1 above 0',
    ),
    ({'learner__optimizer': 'schedule_free', 'rollout__top_p': 0.9}, 'kept set'),
    ({'data__train.kind': 'gsm8k'}, 'needs a path. Set config.data.train.path'),
    ({'eval__pass_at': (1, 4)}, 'pass_at holds 4, but config.eval.samples=1'),
    ({'name': '../elsewhere'}, 'one plain folder name'),
    ({'objective__trust_region': 'ppo_clip(delta_low=2)'}, 'delta_low .* from 0 to 1, got 2'),
    ({'rewards__max_failure_fraction': 1.5}, 'from 0 to 1'),
    ({'checkpoint__every_steps': -1}, '0 or more, got -1'),
    ({'serve__port': 70000}, 'port must be from 0 to 65535, got 70000'),
    ({'serve__grpc_port': 8000}, 'port and grpc_port are both 8000'),
    ({'serve__host': ''}, 'serve.host is empty'),
    ({'serve__token_variable': ''}, 'token_variable is empty'),
    ({'serve__io_timeout_s': 0.0}, 'io_timeout_s must be above 0'),
    ({'serve__max_waiting': -1}, 'max_waiting must be 0 or more'),
  ],
)
def test_bad_values_and_combinations_are_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    make(**changes)


@pytest.mark.parametrize(
  'changes',
  [
    {'fleet__max_staleness': 1},
    {'learner__updates_per_batch': 2},
    {'rollout__kv': 'int8'},
    {'objective__ratio': 'token(base="behaviour")', 'objective__corrections': ()},
    {'objective__regularisers': ('peak_entropy', 'kl_anchor(coef=0.1)')},
  ],
)
def test_recorded_sets_make_the_ratio_defined(changes):
  config = make(rollout__top_p=0.9, rollout__top_k=8, rollout__kept_tokens=8, **changes)
  assert filters(config) and not filters(make(**changes))


def test_boxes_without_a_group_take_groups_of_one():
  for box in ('greedy_baseline', 'role_baseline'):
    assert make(objective__advantage=box, rollout__group_size=1).rollout.group_size == 1


@pytest.mark.parametrize(
  'changes', [{'rollout__weights': 'int8'}, {'rollout__kv': 'fp8'}, {'fleet__max_staleness': 1}]
)
def test_samples_of_another_policy_are_corrected_by_themselves(changes):
  assert not off_policy(make()) and resolve_objective(make()).corrections == ()
  config = make(**changes)
  assert off_policy(config)
  (correction,) = resolve_objective(config).corrections
  assert correction.name == 'token_tis'


def test_the_kinds_of_quantised_rollouts_are_those_of_the_engine():
  for weights in ('same', *KERNEL_KINDS):
    if weights != 'same':
      assert make(rollout__max_draft=2, rollout__draft_weights=weights).rollout.draft_rows == 0
    for kv in ('same', *KV_KINDS):
      rollout = make(rollout__weights=weights, rollout__kv=kv).rollout
      assert (EngineConfig(weights=weights, kv=kv).kv, rollout.weights) == (kv, weights)


def test_nearest_lists_names_when_none_is_near():
  assert config_lib.nearest('zzz', ('alpha', 'beta')) == ' The names are alpha, beta.'


def test_every_field_of_base_has_a_comment():
  lines = (ROOT / 'configs' / 'base.py').read_text().splitlines()
  fields = [line for line in lines if line.startswith('  config.') and 'ConfigDict()' not in line]
  assert len(fields) > 50
  bare = [
    line
    for line in fields
    if '#' not in line and 'verifiers' not in line and '= source(' not in line
  ]
  assert not bare
