"""What config.roles and config.policies make of a run's config, and what they refuse."""

import pytest
from ml_collections import ConfigDict

from configs import base
from rlax_stack import config_rules
from rlax_stack.config import from_config_dict, overridden
from rlax_stack.errors import ConfigError
from rlax_stack.role_config import (
  has_roles,
  policy_config,
  policy_configs,
  policy_of_role,
  role_config,
  role_problems,
  shares_base,
)


def make(policies=None, **changes):
  """The base config with a verifier, fields changed by name with __ for a dot; checked."""
  config = base.get_config()
  config.roles.kind = 'verifier'
  config.policies = ConfigDict(policies or {})
  if policies:
    config.roles.policy = next(iter(policies))
  for path, value in changes.items():
    config.update_from_flattened_dict({path.replace('__', '.'): value})
  made = from_config_dict(config)
  config_rules.check(made)
  return made


JUDGE = {'judge': {'learner': {'learning_rate': 3e-5}, 'objective': {'advantage': 'group_std()'}}}


def test_a_policy_of_its_own_has_a_whole_config_of_its_own():
  config = make(JUDGE, roles__answers=3, roles__verdicts=5, rollout__min_tokens=2)
  assert has_roles(config) and policy_of_role(config) == {'': '', 'verifier': 'judge'}
  made = policy_configs(config)
  assert list(made) == ['', 'judge']
  first, judge = made[''], made['judge']
  assert first.learner == config.learner and first.rollout == config.rollout
  assert not has_roles(first) and first.policies == {} and not has_roles(judge)
  assert judge.learner.learning_rate == 3e-5 and judge.learner.beta2 == config.learner.beta2
  assert judge.objective.advantage == 'group_std()'
  rollout = judge.rollout
  assert (rollout.groups_per_step, rollout.group_size) == (8 * 3, 5)
  assert (rollout.max_prompt_tokens, rollout.max_tokens, rollout.min_tokens) == (512, 256, 0)
  assert policy_config(config, 'judge').rollout == config.rollout


def test_weights_that_play_both_roles_have_room_for_the_groups_of_both():
  config = make(roles__verdicts=12, roles__answers=2, roles__max_tokens=64, rollout__max_tokens=128)
  (wide,) = policy_configs(config).values()
  rollout = wide.rollout
  assert (rollout.groups_per_step, rollout.group_size) == (8 * (1 + 2), 12)
  assert (rollout.max_prompt_tokens, rollout.max_tokens) == (512, 128)
  assert policy_of_role(config) == {'': '', 'verifier': ''}
  assert (role_config(config).rollout.max_tokens, role_config(config).rollout.group_size) == (
    64,
    12,
  )


def test_without_roles_nothing_changes():
  config = from_config_dict(base.get_config())
  assert policy_configs(config) == {'': config} and policy_of_role(config) == {'': ''}
  assert not list(role_problems(config, config_rules.check))


def test_adapters_of_the_same_frozen_weights_share_them():
  adapter = {'learner__adapter__kind': 'lora', 'learner__adapter__base': 'int8'}
  same, other = {'judge': {}}, {'judge': {'learner': {'adapter': {'base': 'int4'}}}}
  for policies, shared in ((same, True), (other, False)):
    first, judge = policy_configs(make(policies, **adapter)).values()
    assert shares_base(first, judge) is shared
  assert not shares_base(*policy_configs(make(same)).values())


def test_overriding_checks_names_and_types():
  section = from_config_dict(base.get_config()).learner
  made = overridden(section, {'learning_rate': 1, 'adapter': {'rank': 4}}, 'p')
  assert (made.learning_rate, made.adapter.rank, made.adapter.alpha) == (1.0, 4, 32.0)
  with pytest.raises(ConfigError, match='unknown field p.adapter.rnk. Did you mean rank'):
    overridden(section, {'adapter': {'rnk': 4}}, 'p')
  with pytest.raises(ConfigError, match='p.warmup_steps must be a int, got 0.5'):
    overridden(section, {'warmup_steps': 0.5}, 'p')
  with pytest.raises(ConfigError, match='p must be a section, got 3'):
    overridden(section, 3, 'p')


@pytest.mark.parametrize(
  ('policies', 'changes', 'message'),
  [
    ({'Judge': {}}, {}, 'config.policies.Judge needs another name'),
    ({'train': {}}, {}, 'config.policies.train needs another name'),
    ({'judge': {'optimizer': {}}}, {}, 'config.policies.judge.optimizer is no section of a policy'),
    ({'judge': {'policies': {}}}, {}, 'config.policies.judge.policies is no section of a policy'),
    ({'judge': {'learner': {'lr': 1}}}, {}, 'unknown field config.policies.judge.learner.lr'),
    ({'judge': {'learner': {'mesh': {'data': 2}}}}, {}, 'judge.learner.mesh cannot differ'),
    ({'judge': {'rollout': {'group_size': 2}}}, {}, 'judge.rollout.group_size cannot differ'),
    ({'judge': {}, 'other': {}}, {}, 'config.policies.other plays no role'),
    ({'judge': {}}, {'roles__kind': 'none'}, 'config.policies.judge plays no role'),
    ({'judge': {}}, {'roles__policy': 'jugde'}, 'plays no role'),
    (None, {'roles__policy': 'judge'}, 'config.roles.policy=judge is not in config.policies'),
    (None, {'roles__kind': 'critic'}, 'config.roles.kind must be one of none, verifier'),
    (None, {'roles__answers': 0}, 'config.roles.answers must be 1 or more, got 0'),
    (None, {'roles__answers': 9}, 'config.roles.answers=9 exceeds the config.rollout.group_size=8'),
    (None, {'roles__weight': 0.5}, 'config.roles.weight=0.5 rewards verdicts, but only'),
    (None, {'roles__weight': -1.0}, 'config.roles.weight must be 0 or more, got -1'),
    (None, {'roles__words': ('yes', 'Yes')}, 'must be two different words'),
    (None, {'roles__words': ('yes ', 'no')}, 'without blanks around them'),
    (None, {'roles__template': '{question}'}, 'needs {question} and {answer}'),
    (None, {'roles__template': '{question.x} {answer}'}, 'nothing else in braces'),
    (None, {'roles__template': '{question} {answer'}, 'config.roles.template cannot be read'),
    (None, {'roles__verdicts': 1}, 'config.roles.verdicts=1 leaves the advantage group_center'),
    (None, {'rollout__strategy': 'delethink(chunk=64, carry=32)'}, "Set it to 'independent'"),
    (None, {'objective__advantage': 'greedy_baseline'}, 'compares with a greedy sample'),
    (
      None,
      {'rollout__answer_drafts': 'coupled', 'rollout__max_draft': 4},
      'answer_drafts=coupled takes the samples of a group for answers to one prompt',
    ),
    (
      {'judge': {'learner': {'row_length': 600}}},
      {},
      'in the config of policy judge: a trajectory may have .* = 768 tokens',
    ),
    (None, {'learner__row_length': 700}, 'for verdicts: a trajectory may have .* = 768 tokens'),
    (
      {'judge': {'objective': {'advantage': 'gae()', 'critic': "separate(warm_start='/x')"}}},
      {},
      'config.policies.judge would start from the critic in /x',
    ),
  ],
)
def test_what_cannot_work_is_refused(policies, changes, message):
  with pytest.raises(ConfigError, match=message):
    make(policies, **changes)
