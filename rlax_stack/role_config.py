"""What config.roles and config.policies say: the config that each policy's parts are built from, and their rules.

Every policy has a whole RunConfig of its own, made of the run's: everything that builds a learner or an engine from a
config builds a policy's from that. Needs no device.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from rlax_stack.config import RunConfig, nearest, overridden
from rlax_stack.errors import ConfigError
from rlax_stack.objective_rules import resolve_objective
from rlax_stack.rollout.strategies import make_strategy
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.verdicts import VERIFIER, check_template

KINDS = ('none', 'verifier')

# Fields of a section that a policy may have of its own. Its groups and their lengths follow from config.roles.
_OWN = ('model', 'objective', 'learner', 'rollout')
_SHARED_FIELDS = {
  'model': ('compute_dtype', 'kernels'),
  'learner': ('mesh',),
  'rollout': (
    'groups_per_step',
    'groups_in_flight',
    'group_size',
    'max_prompt_tokens',
    'max_tokens',
    'min_tokens',
    'answer_drafts',
    'strategy',
  ),
}
# First words of the run's own metrics, before which a policy's name would be read as one of these.
_TAKEN = ('train', 'reward', 'rollout', 'fleet', 'perf', 'time', 'held_out', 'policies', 'solver')


def has_roles(config: RunConfig) -> bool:
  """Whether anybody speaks beside the solver."""
  return config.roles.kind != 'none'


def policy_of_role(config: RunConfig) -> dict[str, str]:
  """Role to policy; '' is the solver, and the first policy."""
  return {'': '', VERIFIER: config.roles.policy} if has_roles(config) else {'': ''}


def policy_configs(config: RunConfig) -> dict[str, RunConfig]:
  """Each policy's config by its name, '' for the first: with the groups that it trains on and their lengths.

  Raises:
    ConfigError: see `policy_config`.
  """
  if not has_roles(config):
    return {'': config}
  if config.roles.policy:
    name = config.roles.policy
    return {'': _alone(config), name: role_config(config)}
  return {'': _widened(config)}


def role_config(config: RunConfig) -> RunConfig:
  """The config of the policy that plays the verifier, with the verifier's groups alone."""
  roles, name = config.roles, config.roles.policy
  own = policy_config(config, name) if name else config
  rollout = _replace(
    own.rollout,
    groups_per_step=config.rollout.groups_per_step * roles.answers,
    groups_in_flight=0,
    group_size=roles.verdicts,
    max_prompt_tokens=roles.max_prompt_tokens,
    max_tokens=roles.max_tokens,
    min_tokens=0,
  )
  plan = _replace(config.plan, mean_tokens=min(config.plan.mean_tokens, roles.max_tokens))
  return _replace(_alone(own), rollout=rollout, plan=plan)


def policy_config(config: RunConfig, name: str) -> RunConfig:
  """The run's config with what config.policies says of one policy.

  Raises:
    ConfigError: no such policy, or fields that a policy cannot have of its own or that are of another type.
  """
  if name not in config.policies:
    known = nearest(name, config.policies) if config.policies else ' There is none.'
    raise ConfigError(f'config.policies has no policy {name!r}.{known}')
  path, changed = f'config.policies.{name}', {}
  for section, values in config.policies[name].items():
    if section not in _OWN:
      raise ConfigError(f'{path}.{section} is no section of a policy.{nearest(section, _OWN)}')
    changed[section] = overridden(getattr(config, section), values, f'{path}.{section}')
    for field in _SHARED_FIELDS.get(section, ()):
      if field in values:
        raise ConfigError(
          f'{path}.{section}.{field} cannot differ between policies: it is of the run, or follows from config.roles. '
          'Leave it out.'
        )
  return _replace(config, **changed)


def shares_base(one: RunConfig, other: RunConfig) -> bool:
  """Whether two policies train adapters of the very same frozen weights, which are then held once."""
  adapted = 'none' not in (one.learner.adapter.kind, other.learner.adapter.kind)
  same = one.learner.adapter.base == other.learner.adapter.base
  return adapted and same and one.model.path == other.model.path


def _alone(config: RunConfig) -> RunConfig:
  """The same without roles."""
  roles = _replace(config.roles, kind='none', policy='')
  return _replace(config, roles=roles, policies={})


def _widened(config: RunConfig) -> RunConfig:
  """Of weights that play both roles: room for the groups of both."""
  rollout, roles = config.rollout, config.roles
  wide = _replace(
    rollout,
    groups_per_step=rollout.groups_per_step * (1 + roles.answers),
    groups_in_flight=0,
    group_size=max(rollout.group_size, roles.verdicts),
    max_prompt_tokens=max(rollout.max_prompt_tokens, roles.max_prompt_tokens),
    max_tokens=max(rollout.max_tokens, roles.max_tokens),
  )
  return _replace(_alone(config), rollout=wide)


def _replace(section: Any, **changes: Any) -> Any:
  return dataclasses.replace(cast(Any, section), **changes)


def role_problems(config: RunConfig, check: Callable[[RunConfig], None]) -> Iterator[str]:
  """What is wrong with config.roles and config.policies.

  Args:
    config: whose other sections are right by themselves.
    check: raises ConfigError for a whole config that cannot work; of the policies' configs.

  Raises:
    ConfigError: what `check`, or making a policy's config, finds.
  """
  yield from _policy_problems(config)
  if not has_roles(config):
    return
  yield from _value_problems(config)
  check_template(config.roles.template)
  yield from _combination_problems(config)
  place = (
    f'in the config of policy {config.roles.policy}' if config.roles.policy else 'for verdicts'
  )
  for where, made in ((place, role_config(config)), ('with roles', policy_configs(config)[''])):
    try:
      check(made)
    except ConfigError as error:
      raise ConfigError(f'{where}: {error}') from error


def _policy_problems(config: RunConfig) -> Iterator[str]:
  for name in config.policies:
    if not re.fullmatch('[a-z][a-z0-9_]*', name) or name in _TAKEN:
      yield (
        f'config.policies.{name} needs another name: lower-case letters, digits and _, and none of '
        f'{", ".join(_TAKEN)}, with which metrics begin.'
      )
    policy_config(config, name)
    if not has_roles(config) or name != config.roles.policy:
      yield (
        f'config.policies.{name} plays no role, so nothing would train it. Set config.roles.kind=verifier and '
        f'config.roles.policy={name}, or take it out.'
      )


def _value_problems(config: RunConfig) -> Iterator[str]:
  roles = config.roles
  for name in ('answers', 'verdicts', 'max_tokens', 'max_prompt_tokens'):
    if getattr(roles, name) < 1:
      yield f'config.roles.{name} must be 1 or more, got {getattr(roles, name)}.'
  if not 0 <= roles.weight < float('inf'):
    yield f'config.roles.weight must be 0 or more, got {roles.weight}.'
  if roles.policy and roles.policy not in config.policies:
    known = nearest(roles.policy, config.policies) if config.policies else ' There is none.'
    yield f'config.roles.policy={roles.policy} is not in config.policies.{known}'
  if len(roles.words) != 2 or len({word.casefold() for word in roles.words}) != 2:
    yield f'config.roles.words must be two different words, got {roles.words}.'
  if not all(word.strip() and word == word.strip() for word in roles.words):
    yield f'config.roles.words must be words without blanks around them, got {roles.words}.'
  if roles.answers > config.rollout.group_size:
    yield (
      f'config.roles.answers={roles.answers} exceeds the config.rollout.group_size={config.rollout.group_size} answers '
      'that there are. Lower it.'
    )
  if roles.weight and roles.answers < config.rollout.group_size:
    yield (
      f'config.roles.weight={roles.weight:g} rewards verdicts, but only config.roles.answers={roles.answers} '
      f'of config.rollout.group_size={config.rollout.group_size} answers get any: the others would compare badly for '
      'no fault. Set answers to the group size, or weight to 0.'
    )


def _combination_problems(config: RunConfig) -> Iterator[str]:
  rollout = config.rollout
  if not isinstance(make_strategy(rollout.strategy), Independent):
    yield (
      f'config.rollout.strategy={rollout.strategy} does not go with config.roles.kind={config.roles.kind}, whose '
      "answers are drawn from the prompt. Set it to 'independent'."
    )
  if rollout.answer_drafts != 'none':
    yield (
      f'config.rollout.answer_drafts={rollout.answer_drafts} takes the samples of a group for answers to one prompt, '
      f'which config.roles.kind={config.roles.kind} makes untrue. Set it to none.'
    )
  own = role_config(config)
  for place, made in (('config', config), (f'config.policies.{config.roles.policy}', own)):
    if 'greedy' in resolve_objective(made).tags:
      yield (
        f'{place}.objective.advantage={made.objective.advantage} compares with a greedy sample, for which '
        f'config.roles.kind={config.roles.kind} has no place. Take another advantage.'
      )
  if config.roles.verdicts < 2 and 'group' in resolve_objective(own).advantage.box.tags:
    yield (
      f'config.roles.verdicts={config.roles.verdicts} leaves the advantage {own.objective.advantage} nothing to '
      'compare with. Set it to 2 or more, or take another advantage.'
    )
  critic = resolve_objective(own).critic_settings
  if config.roles.policy and critic is not None and critic.warm_start:
    yield (
      f'config.policies.{config.roles.policy} would start from the critic in {critic.warm_start}, which is for the '
      'first policy alone. Give it a critic without warm_start in its objective.'
    )
