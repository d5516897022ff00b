"""A teacher: another model's log-probs of the tokens that the policy sampled, from the same packed rows.

Not for training it or sampling from it. Invariant: its weights never change and are in no checkpoint; they come from
where the config says.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlax_stack.errors import ConfigError
from rlax_stack.learner import multihost
from rlax_stack.learner.scoring import ForwardSettings, make_score
from rlax_stack.learner.settings import LearnerSettings
from rlax_stack.models.config import ModelConfig
from rlax_stack.sharding import param_shardings
from rlax_stack.types import PackedBatch


class Teacher(NamedTuple):
  """A model that is only asked for log-probs."""

  config: ModelConfig
  params: Any  # nested dict of arrays, as models/decoder.py has it


def teacher_forward(settings: ForwardSettings) -> ForwardSettings:
  """How a teacher computes beside a policy that computes so: alike, without adapter and gradients."""
  return dataclasses.replace(settings, adapter=None, remat='none')


def check_teacher(teacher: ModelConfig, policy: ModelConfig) -> None:
  """Raises ConfigError where the teacher cannot score the policy's tokens."""
  if teacher.vocab_size != policy.vocab_size:
    raise ConfigError(
      f'the model of config.learner.teacher has {teacher.vocab_size} tokens and the policy {policy.vocab_size}: a '
      'teacher scores the tokens of the policy. Take one of the same family.'
    )


def _placed(teacher: Teacher, settings: ForwardSettings, mesh: Mesh) -> Any:
  """Its weights on the mesh, in the compute dtype."""
  host = jax.tree.map(
    lambda leaf: np.asarray(leaf).astype(jnp.dtype(settings.compute_dtype)), teacher.params
  )
  return multihost.place(host, param_shardings(host, mesh))


def make_teacher_score(
  teacher: Teacher | None,
  policy: ModelConfig,
  settings: LearnerSettings,
  mesh: Mesh,
  *,
  needed: bool = True,
) -> Callable[[PackedBatch, jax.Array], jax.Array] | None:
  """Scoring under the teacher.

  Args:
    teacher: copied to the mesh, split by the same rules as the policy, in the compute dtype.
    policy: shape of the model that is trained.
    settings: temperature and kernels of the policy's forward pass are the teacher's too.
    mesh: where the rows live.
    needed: False where the policy may be its own teacher.

  Returns: function (batch [M, rows, ...], num_micro int32 scalar) -> float32 [M, rows, N], 0 where masked; None where
    no box of the objective reads that, or there is no teacher.

  Raises:
    ConfigError: no teacher, or one of another vocabulary.
  """
  if 'teacher' not in settings.objective.tags:
    return None
  if teacher is None and not needed:
    return None
  if teacher is None:
    raise ConfigError('the objective compares with a teacher. Set config.learner.teacher.')
  check_teacher(teacher.config, policy)
  forward = teacher_forward(settings.forward)
  params, score = _placed(teacher, forward, mesh), make_score(teacher.config, mesh, forward)
  # The rollout's experts are those of the policy's routers.
  return lambda batch, num_micro: score(params, batch._replace(experts=None), num_micro)
