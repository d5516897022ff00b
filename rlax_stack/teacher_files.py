"""The teacher that a config names, from its files."""

import numpy as np

from rlax_stack.config import RunConfig
from rlax_stack.errors import ConfigError
from rlax_stack.learner.teacher import Teacher, check_teacher
from rlax_stack.models.load import LoadedModel, load_model

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
