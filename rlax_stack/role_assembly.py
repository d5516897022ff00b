"""Builds the parts of a run from its config, those of further policies and roles among them.

A run without roles gets what assembly makes. Every policy's learner and engine are assembly's too, from its own config.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlax_stack import assembly, profiling, sources
from rlax_stack.config import RunConfig
from rlax_stack.data.iterator import PromptIterator
from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.learner.joint_learner import JointLearner
from rlax_stack.learner.learner import Learner
from rlax_stack.models.load import LoadedModel, load_model
from rlax_stack.objective_rules import resolve_objective
from rlax_stack.rewards.chain import RewardChain
from rlax_stack.role_config import (
  has_roles,
  policy_configs,
  policy_of_role,
  role_config,
  shares_base,
)
from rlax_stack.rollout.joint_scheduler import JointScheduler
from rlax_stack.rollout.strategies.verdicts import VERIFIER, Verdicts
from rlax_stack.rollout.worker import RolloutWorker

Models = Mapping[str, LoadedModel]


def policy_models(config: RunConfig, model: LoadedModel) -> dict[str, LoadedModel]:
  """The model of every policy, weights as they lie under its adapter; '' is the first.

  Args:
    config: of the run.
    model: that config.model.path names, loaded; policies of the same path share its weights.

  Raises:
    ConfigError: a role's prompts and samples exceed a context.
    ModelFileError: see `load_model`.
  """
  models: dict[str, LoadedModel] = {}
  for name, made in policy_configs(config).items():
    loaded = model if made.model.path == config.model.path else load_model(made.model.path)
    assembly.check_context(made, loaded)
    again = bool(models) and shares_base(config, made)
    models[name] = assembly.with_frozen_weights(made, models[''] if again else loaded)
  return models


def make_learner(config: RunConfig, models: Models) -> Learner | JointLearner:
  """The learner, or those of all policies as one, on one mesh."""
  if not has_roles(config):
    return assembly.make_learner(config, models[''])
  learners: dict[str, Learner] = {}
  for name, made in policy_configs(config).items():
    model = models[name]
    if learners and shares_base(config, made):
      model = dataclasses.replace(model, params=learners[''].frozen[0])
    learners[name] = assembly.make_learner(made, model)
  return JointLearner(learners, policy_of_role(config))


def make_coordinator(config: RunConfig, iterator: PromptIterator) -> Coordinator:
  """The coordinator over the training prompts; a lease is of a prompt and all samples that come of it."""
  if not has_roles(config):
    return assembly.make_coordinator(config, iterator)
  roles = config.roles
  of_role = {'': config, VERIFIER: role_config(config)}
  return assembly.make_coordinator(
    config,
    iterator,
    num_samples=config.rollout.group_size + roles.answers * roles.verdicts,
    min_sizes={
      role: 2 if 'group' in resolve_objective(made).tags else 1 for role, made in of_role.items()
    },
  )


def make_verdicts(config: RunConfig, models: Models) -> Verdicts:
  """How a group's answers are drawn and judged."""
  roles, tokenizer = config.roles, models[config.roles.policy].tokenizer
  correct, wrong = roles.words
  return Verdicts(
    group_size=config.rollout.group_size,
    answers=roles.answers,
    verdicts=roles.verdicts,
    policy=roles.policy,
    tokenizer=tokenizer,
    sampling=sources.train_sampling(role_config(config), tuple(tokenizer.stop_token_ids)),
    max_prompt_tokens=roles.max_prompt_tokens,
    template=roles.template,
    words=(correct, wrong),
    label=next(iter(config.rewards.verifiers)),
    correct_at=roles.correct_at,
    weight=roles.weight,
  )


def make_worker(config: RunConfig, models: Models, chain: RewardChain) -> RolloutWorker:
  """The rollout worker of the embedded runtime, with an engine for every policy."""
  if not has_roles(config):
    return assembly.make_worker(config, models[''], chain)
  made, verdicts = policy_configs(config), make_verdicts(config, models)
  schedulers = {name: assembly.make_scheduler(each, models[name]) for name, each in made.items()}
  merges = {name: assembly.merging(each, models[name]) for name, each in made.items()}

  def served(published: Mapping[str, Any]) -> Any:
    """The weights to serve: of each policy, or of the only one."""
    whole = {
      name: published[name] if merge is None else merge(published[name])
      for name, merge in merges.items()
    }
    return whole if len(whole) > 1 else whole['']

  return RolloutWorker(
    JointScheduler(schedulers) if len(schedulers) > 1 else schedulers[''],
    tokenizer=models[''].tokenizer,
    tokenizers={VERIFIER: models[config.roles.policy].tokenizer},
    score=verdicts.scorer(chain.score),
    sampling=sources.train_sampling(config, models[''].tokenizer.stop_token_ids),
    strategy=verdicts,
    merge=served,
  )


def make_utilisation(
  config: RunConfig, models: Models, device_kind: str
) -> Callable[[Mapping[str, float], float], dict[str, float]]:
  """`profiling.make_utilisation`, of the work of all policies together."""
  each = {
    name: profiling.make_utilisation(made, models[name].config, device_kind)
    for name, made in policy_configs(config).items()
  }

  def utilisation(packed: Mapping[str, float], seconds: float) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, of_policy in each.items():
      start = f'{name}/train/' if name else ''
      own = {key.removeprefix(start): v for key, v in packed.items() if key.startswith(start)}
      for key, value in of_policy(own, seconds).items():
        total[key] = total.get(key, 0.0) + value
    return total

  return utilisation
