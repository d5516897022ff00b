"""The learner: groups in, new weights out. Packs, transfers, steps; knows no worker, coordinator or
file.

Not for the loop of a run. Invariant: `version` counts the batches trained, and `params` are the
weights of it.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.errors import DataError, NonFiniteError
from rlax_stack.learner import packing
from rlax_stack.learner.optimizer import OptimizerSettings, make_optimizer
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings, make_score, rows_sharding
from rlax_stack.learner.state import LearnerState, abstract_state, init_state
from rlax_stack.learner.train_step import LossSettings, make_train_step
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.advantages import group_advantages
from rlax_stack.types import Group, PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
  """Tunables of the learner.

  advantage: 'center', 'std' or 'leave_one_out'. updates_per_batch: optimizer updates on each batch
  (the μ of GRPO); above 1 the proximal log-probs are scored first. max_skipped_in_row: so many
  non-finite updates in a row stop the run.
  """

  rows: RowPlan
  forward: ForwardSettings
  loss: LossSettings
  optimizer: OptimizerSettings
  advantage: str = 'center'
  updates_per_batch: int = 1
  max_skipped_in_row: int = 5


class StepMetrics:
  """Metrics of one batch, still on the device; `result` waits for them."""

  def __init__(self, scalars: Mapping[str, jax.Array], host: Mapping[str, float]):
    self._scalars, self._host = scalars, host

  def result(self) -> dict[str, float]:
    """All metrics as Python floats; blocks until the step is done."""
    fetched = jax.device_get(dict(self._scalars))
    return dict(self._host) | {name: float(value) for name, value in fetched.items()}


class Learner:
  """Trains a model on groups of scored trajectories.

  Args:
    config: shape of the model.
    params: nested dict of arrays; copied. With `loss.kl_coef` they are the anchor too, for ever:
      restore a
      checkpoint with `restore`, not by passing its weights here.
    settings: see LearnerSettings.
    mesh: from `sharding.make_mesh`.
  """

  def __init__(self, config: ModelConfig, params: Any, settings: LearnerSettings, mesh: Mesh):
    self._config, self._settings, self._mesh = config, settings, mesh
    self._optimizer = make_optimizer(settings.optimizer)
    self._replicated = NamedSharding(mesh, PartitionSpec())
    self._state = init_state(params, self._optimizer, mesh)
    self._version = 0
    self._loss = dataclasses.replace(settings.loss, score_proximal=settings.updates_per_batch > 1)
    self._step = make_train_step(
      config,
      mesh,
      forward=settings.forward,
      loss=self._loss,
      optimizer=settings.optimizer,
    )
    self._score = make_score(config, mesh, settings.forward)
    self._capacity = settings.rows.max_micro_batches
    self._anchor = self.snapshot() if settings.loss.kl_coef else None
    self._last: StepMetrics | None = None

  @property
  def state(self) -> LearnerState:
    """What a checkpoint stores. Its arrays are given up at the next `train`."""
    return self._state

  @property
  def version(self) -> int:
    """Batches trained, known without waiting for the device."""
    return self._version

  @property
  def params(self) -> Any:
    """The current weights. Their arrays are given up at the next `train`.

    Copy what must live on.
    """
    return self._state.params

  def snapshot(self, dtype: Any = jnp.float32) -> Any:
    """A copy of the current weights in `dtype`, with their shardings.

    That outlives the next `train`.
    """
    return _copy(self._state.params, dtype)

  def abstract_state(self) -> Any:
    """Shapes, dtypes and shardings of `state`, for restoring into."""
    return abstract_state(self._state.params, self._optimizer, self._mesh)

  def restore(self, state: LearnerState) -> None:
    """Continues from `state`, which the learner owns from now on."""
    self._state, self._last = state, None
    self._version = int(jax.device_get(state.version))

  def train(self, groups: Sequence[Group]) -> StepMetrics:
    """Trains on one batch and returns at once; the device works on.

    Args:
      groups: every trajectory with a finite `reward.value`, at least two to a group.

    Returns: StepMetrics, on the device until asked for.

    Raises:
      ConfigError, DataError, RewardError: groups that cannot be trained on.
      NonFiniteError: `max_skipped_in_row` updates in a row, up to the previous batch, were not
        finite.
    """
    self.check_finite()
    packed = self._pack(groups, [self._advantages(group) for group in groups])
    stats = packing.packing_stats(packed)
    batch, num_micro = self._place(packed)
    if self._anchor is not None:
      scores = self._score(self._anchor, batch, num_micro)
      batch = batch._replace(anchor_log_probs_t=scores)
    if self._loss.score_proximal:
      scores = self._score(self._state.params, batch, num_micro)
      batch = batch._replace(proximal_log_probs_t=scores)
    for _ in range(self._settings.updates_per_batch):
      self._state, scalars = self._step(self._state, batch, num_micro)
    self._version += 1
    version = jax.device_put(np.int32(self._version), self._replicated)
    self._state = self._state._replace(version=version)
    self._last = StepMetrics(scalars, {k: float(v) for k, v in stats.items()})
    return self._last

  def check_finite(self) -> None:
    """Waits for the last step; NonFiniteError where too many updates in a row were skipped."""
    limit = self._settings.max_skipped_in_row
    if self._last is None:
      return
    skipped = int(self._last.result()['skipped_in_row'])
    if skipped >= limit:
      raise NonFiniteError(
        f'{skipped} updates in a row had a non-finite loss or gradient, the limit is {limit}. '
        'Lower config.learner.learning_rate, or look for NaN in the weights and rewards.'
      )

  def score(self, groups: Sequence[Group]) -> tuple[tuple[np.ndarray, ...], ...]:
    """Log-probs of the trained tokens under the current weights.

    Returns: for each group, for each trajectory, float32 [T], 0 where `mask_t` is False.
    """
    packed = self._pack(groups, [np.zeros(len(g.trajectories), np.float32) for g in groups])
    batch, num_micro = self._place(packed)
    scores = np.asarray(jax.device_get(self._score(self._state.params, batch, num_micro)))
    scores = scores.reshape(-1, scores.shape[-1])[: packed.tokens.shape[0]]
    index, result = 0, []
    for group in groups:
      of_group = []
      for trajectory in group.trajectories:
        out = np.zeros(len(trajectory.tokens), np.float32)
        # Triples of one trajectory lie in one row, in the order of its tokens.
        out[trajectory.mask_t] = scores[packed.trajectory_t == index]
        of_group.append(out)
        index += 1
      result.append(tuple(of_group))
    return tuple(result)

  def _advantages(self, group: Group) -> np.ndarray:
    values = [t.reward.value if t.reward else None for t in group.trajectories]
    rewards = [value for value in values if value is not None]
    if len(rewards) < len(values):
      raise DataError(
        f'group {group.group_id} has a trajectory without a reward. Score it or drop it first.'
      )
    return group_advantages(rewards, estimator=self._settings.advantage)

  def _pack(self, groups, advantages) -> PackedBatch:
    plan = self._settings.rows
    return packing.pack_groups(
      groups, advantages, row_shapes=[plan.shape], rows_multiple=plan.micro_batch_rows
    )

  def _place(self, packed: PackedBatch) -> tuple[PackedBatch, jax.Array]:
    """Rows as [M, rows, ...] on the mesh, M always the same, and how many of the M are in use."""
    rows = self._settings.rows.micro_batch_rows
    num_micro = packed.tokens.shape[0] // rows
    if num_micro > self._capacity:
      logging.warning(
        'a batch needs %d micro-batches, more than the planned %d: the step is compiled again',
        num_micro,
        self._capacity,
      )
      self._capacity = 1 << (num_micro - 1).bit_length()
    padded = packing.pad_rows(packed, self._capacity * rows)
    cut = jax.tree.map(lambda x: x.reshape(self._capacity, rows, *x.shape[1:]), padded)
    batch = jax.device_put(cut, rows_sharding(self._mesh))
    return batch, jax.device_put(np.int32(num_micro), self._replicated)


@functools.partial(jax.jit, static_argnames='dtype')
def _copy(params: Any, dtype: Any) -> Any:
  """A copy that shares no buffer with `params`."""
  return jax.tree.map(lambda leaf: jnp.copy(leaf).astype(dtype), params)
