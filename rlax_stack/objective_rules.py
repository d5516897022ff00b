"""The objective of a run's config, and what it demands of the other sections.

Not for what boxes demand of each other (`objectives.objective.resolve`). Needs no device.
"""

from collections.abc import Iterator

from rlax_stack.config import RunConfig
from rlax_stack.objectives.objective import Objective, resolve
from rlax_stack.rewards.verifiers import STEP_VERIFIERS
from rlax_stack.rollout.strategies import make_strategy, trains_on_the_past
from rlax_stack.teacher_context import template_problems


def resolve_objective(config: RunConfig) -> Objective:
  """The boxes that config.objective names.

  Raises:
    ConfigError: an unknown box or option, a value of another type, or boxes that contradict.
  """
  section = config.objective
  return resolve(
    shaping=section.shaping,
    advantage=section.advantage,
    ratio=section.ratio,
    trust_region=section.trust_region,
    corrections=section.corrections,
    regularisers=section.regularisers,
    aggregation=section.aggregation,
    critic=section.critic,
    off_policy=off_policy(config),
    max_tokens=config.rollout.max_tokens,
  )


def off_policy(config: RunConfig) -> bool:
  """Whether a sample may be trained on by another policy than the one that drew it."""
  rollout, learner = config.rollout, config.learner
  quantised = rollout.weights != 'same' or rollout.kv != 'same'
  past = trains_on_the_past(make_strategy(rollout.strategy))
  # Schedule-free runs sample from the average and take gradients elsewhere.
  moved = learner.updates_per_batch > 1 or learner.optimizer == 'schedule_free'
  return quantised or past or moved or config.fleet.max_staleness > 0


def filters(config: RunConfig) -> bool:
  """Whether training samples are drawn from a part of the vocabulary."""
  rollout = config.rollout
  return rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0


def objective_problems(config: RunConfig) -> Iterator[str]:
  """What the objective demands and the other sections do not give.

  Raises:
    ConfigError: see `resolve_objective`.
  """
  objective, rollout = resolve_objective(config), config.rollout
  if rollout.group_size < 2 and 'group' in objective.advantage.box.tags:
    yield (
      f'config.objective.advantage={objective.advantage.name} compares the samples of a group, but '
      f'config.rollout.group_size={rollout.group_size}. Set config.rollout.group_size to 2 or more.'
    )
  verifiers = {str(v.get('name', label)) for label, v in config.rewards.verifiers.items()}
  stepwise = [bound.name for bound in objective.boxes if 'steps' in bound.box.tags]
  if stepwise and not verifiers & STEP_VERIFIERS:
    yield (
      f'{stepwise[0]} of config.objective reads rewards of steps, but config.rewards.verifiers holds only '
      f'{", ".join(sorted(verifiers))}. Add one that gives them: {", ".join(sorted(STEP_VERIFIERS))}.'
    )
  asking = [bound.name for bound in objective.boxes if 'teacher' in bound.box.tags]
  learner = config.learner
  if asking and not (learner.teacher or learner.teacher_context):
    yield (
      f'{asking[0]} of config.objective compares with a teacher, but config.learner.teacher names none. Set it to the '
      'path of a model with the same tokens, or set config.learner.teacher_context for the policy to teach itself.'
    )
  if learner.teacher_context:
    yield from template_problems(learner.teacher_context)
  given = next((n for n in ('teacher', 'teacher_context') if getattr(learner, n)), '')
  if given and not asking:
    yield (
      f'config.learner.{given}={getattr(learner, given)} is scored for boxes that compare with it, and '
      "config.objective has none. Add config.objective.regularisers=('kl_teacher(coef=1.0)',) or "
      'config.objective.advantage=teacher, or leave it empty.'
    )
  critic = objective.critic_settings
  updates = config.steps * config.learner.updates_per_batch
  if critic and critic.pretrain_updates >= updates:
    yield (
      f'pretrain_updates={critic.pretrain_updates} of config.objective.critic leaves no update of the '
      f'policy: config.steps * config.learner.updates_per_batch = {updates}. Lower it, or train longer.'
    )
  reads = _importance_ratio(config, objective)
  if reads and filters(config) and not rollout.kept_tokens:
    yield (
      f'top_k, top_p and min_p change the support of the sampled distribution, so the importance '
      f'ratio ({reads}) is not defined without the kept set. Record it with config.rollout.kept_tokens=N '
      f'(N ids per token{f", {rollout.top_k} or more" if rollout.top_k else ""}), or set '
      'config.rollout.top_k=0, top_p=1 and min_p=0, or keep to the sampling policy: '
      'config.fleet.max_staleness=0, config.learner.updates_per_batch=1, an optimizer other than '
      "schedule_free, config.rollout.weights=same, kv=same, ratio 'token' and no correction."
    )
  whole = [b.name for b in objective.device_boxes.values() if b.box.proximal_vocabulary is not None]
  if whole and rollout.kept_tokens:
    yield (
      f'{whole[0]} of config.objective compares log-probs with distributions over the whole vocabulary, '
      f'but with config.rollout.kept_tokens={rollout.kept_tokens} they are within the kept sets. Set '
      'config.rollout.top_k=0, top_p=1, min_p=0 and kept_tokens=0, or take another box.'
    )


def _importance_ratio(config: RunConfig, objective: Objective) -> str:
  """What compares a policy with the one that sampled; empty where nothing does."""
  for slot, bound in objective.device_boxes.items():
    if bound.box.tags & {'importance', 'behaviour'}:
      return f'config.objective.{slot.partition("/")[0]}={bound.name}'
  if 'no_ratio' in objective.trust_region.box.tags:
    return ''
  if dict(objective.ratio.options).get('base') == 'behaviour':
    return f'config.objective.ratio={objective.ratio.text}'
  if not off_policy(config):
    return ''
  return 'max_staleness, updates_per_batch, schedule_free, quantised rollouts or replay'
