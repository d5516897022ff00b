"""Models beside the policy, from their files: a teacher, and the critic of an earlier run."""

import numpy as np

from rlax_stack.config import RunConfig, to_plain
from rlax_stack.errors import ConfigError
from rlax_stack.learner.checkpoint import load_checkpoint_critic
from rlax_stack.learner.joint_learner import JointLearner
from rlax_stack.learner.learner import Learner
from rlax_stack.learner.other_context import OtherContext
from rlax_stack.learner.row_plan import plan_rows
from rlax_stack.learner.teacher import Teacher, check_teacher
from rlax_stack.models.load import LoadedModel, load_model
from rlax_stack.objective_rules import resolve_objective
from rlax_stack.rollout.strategies import make_strategy
from rlax_stack.sharding import row_shards
from rlax_stack.teacher_context import context_limit, teacher_prompt

_PROBES = ('Solve 12 + 7.', 'def f(x): return x ** 2', 'naïve café 数学')  # read alike by both


def load_teacher(config: RunConfig, policy: LoadedModel) -> Teacher | None:
  """The model that config.learner.teacher names; None where it names none.

  Raises:
    ModelFileError: see `load_model`.
    ConfigError: a model whose tokens are not the policy's, or that was made for shorter samples.
  """
  path = config.learner.teacher
  if not path:
    return None
  model = load_model(path)
  check_teacher(model.config, policy.config)
  for text in _PROBES:
    if not np.array_equal(model.tokenizer.encode(text), policy.tokenizer.encode(text)):
      raise ConfigError(
        f'config.learner.teacher={path} reads {text!r} as other tokens than {config.model.path} does. Take a teacher '
        'of the same family.'
      )
  longest = min(config.rollout.max_prompt_tokens + _span(config), policy.config.max_context)
  if model.config.max_context < longest:
    raise ConfigError(
      f'samples may have {longest} tokens, more than the context of config.learner.teacher={path}, '
      f'{model.config.max_context} tokens. Lower config.rollout.max_tokens, or take another teacher.'
    )
  return Teacher(model.config, model.params)


def _span(config: RunConfig) -> int:
  """Tokens of a sample after its prompt at most."""
  return make_strategy(config.rollout.strategy).limits(config.rollout.max_tokens).span


def make_other_context(
  config: RunConfig, model: LoadedModel, teacher: Teacher | None
) -> OtherContext | None:
  """How samples get behind what config.learner.teacher_context makes of their prompts; None where it is empty.

  Raises:
    ConfigError: such samples may exceed the context of who reads them: the teacher, or without one the policy.
  """
  if not config.learner.teacher_context:
    return None
  section, rollout = config.learner, config.rollout
  span, most = _span(config), context_limit(config)
  reader = model.config if teacher is None else teacher.config
  if most + span > reader.max_context:
    raise ConfigError(
      f'config.learner.teacher_context may take {most} tokens, and {span} after them exceed the context of '
      f'{section.teacher or config.model.path}, {reader.max_context} tokens. Lower '
      'config.learner.teacher_context_tokens.'
    )
  rows = plan_rows(
    groups_per_batch=rollout.groups_per_step,
    group_size=rollout.group_size,
    max_prompt_tokens=most,
    max_tokens=span,
    micro_batch_tokens=section.micro_batch_tokens,
    data_parallel=row_shards(to_plain(section.mesh)),
    context=section.mesh.context,
  )
  return OtherContext(
    lambda group: teacher_prompt(config, model.tokenizer, group.prompt),
    rows,
    weigh_places=reader.num_experts > 0,
  )


def warm_start(config: RunConfig, learner: Learner | JointLearner) -> str:
  """Gives a fresh learner the critic of an earlier run, where the config names one.

  Returns: the path it came from, '' where none is named.

  Raises:
    CheckpointError: no critic there.
    ConfigError: one of other shapes.
  """
  critic = resolve_objective(config).critic_settings
  if critic is None or not critic.warm_start:
    return ''
  learner.take_critic(load_checkpoint_critic(critic.warm_start), critic.warm_start)
  return critic.warm_start
