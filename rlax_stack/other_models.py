"""Models beside the policy, from their files: a teacher, and the critic of an earlier run."""

import numpy as np

from rlax_stack.config import RunConfig
from rlax_stack.errors import ConfigError
from rlax_stack.learner.checkpoint import load_checkpoint_critic
from rlax_stack.learner.joint_learner import JointLearner
from rlax_stack.learner.learner import Learner
from rlax_stack.learner.teacher import Teacher, check_teacher
from rlax_stack.models.load import LoadedModel, load_model
from rlax_stack.objective_rules import resolve_objective

_PROBES = ('Solve 12 + 7.', 'def f(x): return x ** 2', 'naïve café 数学')  # read alike by both


def load_teacher(config: RunConfig, policy: LoadedModel) -> Teacher | None:
  """The model that config.learner.teacher names; None where it names none.

  Raises:
    ModelFileError: see `load_model`.
    ConfigError: a model whose tokens are not the policy's.
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
  return Teacher(model.config, model.params)


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
