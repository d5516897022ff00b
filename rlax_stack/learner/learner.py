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
from rlax_stack.learner import critic as critics
from rlax_stack.learner import multihost, packing
from rlax_stack.learner.adapter_identity import identity_of
from rlax_stack.learner.mixture_rules import check_mixture
from rlax_stack.learner.optimizer import OptimizerSettings, make_optimizer
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import (
  ForwardSettings,
  make_proximal_score,
  make_score,
  rows_sharding,
)
from rlax_stack.learner.state import LearnerState, abstract_state, init_state
from rlax_stack.learner.train_step import make_train_step
from rlax_stack.models import decoder
from rlax_stack.models.adapter import init_adapter
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.frozen import freeze
from rlax_stack.objectives import reward_batch
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.objective import Objective
from rlax_stack.objectives.router import NO_ROUTER_LOSS, RouterLoss
from rlax_stack.sharding import param_shardings
from rlax_stack.types import Group, PackedBatch

_ANCHORED = {'anchor', 'host_scores'}  # tags of boxes that need the starting weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
  """Tunables of the learner.

  updates_per_batch: optimizer updates on each batch (the μ of GRPO); above 1 the proximal log-probs
  are scored first, and averaged weights score them before every update. max_skipped_in_row: so many
  non-finite updates in a row stop the run. router: losses of a mixture of experts. meeting_deadline_s:
  in a job of several processes, how long one waits for the others before a batch.
  """

  rows: RowPlan
  forward: ForwardSettings
  objective: Objective
  optimizer: OptimizerSettings
  updates_per_batch: int = 1
  max_skipped_in_row: int = 5
  router: RouterLoss = NO_ROUTER_LOSS
  meeting_deadline_s: float = 300.0

  @property
  def scores_proximal(self) -> bool:
    """Whether the proximal policy is scored by itself: it is another one than the current policy."""
    return self.updates_per_batch > 1 or self.objective.average_decay is not None


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
    params: nested dict of arrays; copied. Where the objective has an anchor they are it too, for
      ever: restore a checkpoint with `restore`, not by passing its weights here. Under an adapter they are
      frozen and only placed; they may be in that form already (`frozen.freeze`).
    settings: see LearnerSettings.
    mesh: from `sharding.make_mesh`. Over the devices of several processes (`multihost.start`) each of them makes a
      learner of equal arguments and gives it the same groups.
  """

  def __init__(self, config: ModelConfig, params: Any, settings: LearnerSettings, mesh: Mesh):
    check_mixture(config, settings.router, mesh)
    self._config, self._settings, self._mesh = config, settings, mesh
    self._optimizer = make_optimizer(settings.optimizer)
    self._replicated = NamedSharding(mesh, PartitionSpec())
    self._objective = settings.objective
    self._averaged = self._objective.average_decay is not None
    self._critic = settings.objective.critic_settings
    adapter = settings.forward.adapter
    policy = decoder.abstract_params(config) if adapter else None
    self._make_critic_state = critics.make_state(self._critic, settings.optimizer, policy)
    self._frozen: tuple[Any, ...] = ()
    trained = params
    if adapter:
      base = freeze(params, adapter.base)
      base = multihost.place(base, param_shardings(base, mesh))
      trained = jax.jit(functools.partial(init_adapter, config, adapter))(base)
      self._frozen = (base,)
    self._state = init_state(
      trained,
      self._optimizer,
      mesh,
      self._objective.init_state,
      self._make_critic_state,
      self._averaged,
    )
    self._host_state = self._objective.init_host_state()
    self._version = 0
    self._score_proximal = settings.scores_proximal
    self._step = make_train_step(
      config,
      mesh,
      forward=settings.forward,
      objective=self._objective,
      optimizer=settings.optimizer,
      score_proximal=self._score_proximal,
      router=settings.router,
    )
    self._score = make_score(config, mesh, settings.forward)
    self._proximal = make_proximal_score(config, mesh, settings.forward, self._objective)
    if self._critic is not None:
      self._score_values = critics.make_value_score(config, mesh, settings.forward, self._critic)
    self._capacity = settings.rows.max_micro_batches
    # Under an adapter this is a fresh one, which changes nothing: the anchor is the frozen weights themselves.
    self._anchor = self.snapshot() if self._objective.tags & _ANCHORED else None
    self._last: StepMetrics | None = None

  @property
  def state(self) -> LearnerState:
    """What a checkpoint stores. Its arrays are given up at the next `train`."""
    return self._state

  @property
  def host_state(self) -> dict[str, Any]:
    """What the objective's boxes on the host carry from batch to batch, a JSON object.

    A checkpoint stores it beside `state`. It has seen every batch given to `train`, those whose update
    was skipped included.
    """
    return self._host_state

  @property
  def version(self) -> int:
    """Batches trained, known without waiting for the device."""
    return self._version

  @property
  def params(self) -> Any:
    """What is trained: the weights, or the adapter. Its arrays are given up at the next `train`.

    Copy what must live on.
    """
    return self._state.params

  @property
  def frozen(self) -> tuple[Any, ...]:
    """The weights under the adapter, as programs take them after their other arguments; () without one."""
    return self._frozen

  @functools.cached_property
  def adapter_identity(self) -> dict[str, Any] | None:
    """What a checkpoint says of the adapter and of the weights under it, a JSON object; None without one."""
    adapter = self._settings.forward.adapter
    return None if adapter is None else identity_of(adapter, self._frozen[0])

  def snapshot(self, dtype: Any = jnp.float32) -> Any:
    """A copy of `params` in `dtype`, with their shardings, that outlives the next `train`."""
    return _copy(self._state.params, dtype)

  def abstract_state(self) -> Any:
    """Shapes, dtypes and shardings of `state`, for restoring into."""
    return abstract_state(
      self._state.params,
      self._optimizer,
      self._mesh,
      self._objective.init_state,
      self._make_critic_state,
      self._averaged,
    )

  def restore(self, state: LearnerState, host_state: Mapping[str, Any] | None = None) -> None:
    """Continues from `state`, which the learner owns from now on, and from `host_state`."""
    self._state, self._last = state, None
    fresh, saved = self._objective.init_host_state(), host_state or {}
    self._host_state = {slot: saved.get(slot, value) for slot, value in fresh.items()}
    self._version = int(jax.device_get(state.version))

  def take_critic(self, found: Any, source: str) -> None:
    """Starts from the critic of an earlier run; its optimizer starts afresh.

    Args:
      found: its parameters, nested dict of numpy arrays (`load_checkpoint_critic`).
      source: where they come from, for messages.

    Raises:
      ConfigError: they are of another critic than this learner's.
    """
    fresh = self._state.critic.get('params', {})
    critic = self._state.critic | {'params': critics.taken_over(found, fresh, source)}
    self._state = self._state._replace(critic=critic)

  def train(self, groups: Sequence[Group]) -> StepMetrics:
    """Trains on one batch and returns at once; the device works on.

    Args:
      groups: every trajectory with a finite `reward.value`; at least two to a group where the
        estimator compares them.

    Returns: StepMetrics, on the device until asked for.

    Raises:
      ConfigError, DataError, RewardError: groups that cannot be trained on.
      NonFiniteError: `max_skipped_in_row` updates in a row, up to the previous batch, were not
        finite.
    """
    self.check_finite()
    packed = self._pack_to_train(groups)
    stats = packing.packing_stats(packed)
    batch, num_micro = self._place(packed)
    if self._anchor is not None and 'anchor' in self._objective.tags:
      # The anchor is another policy, whose routers are its own.
      bare = batch._replace(experts=None)
      scores = self._score(self._anchor, bare, num_micro, *self._frozen)
      batch = batch._replace(anchor_log_probs_t=scores)
    if self._critic is not None:
      critic_params = self._state.critic['params']
      values, after = self._score_values(
        self._state.params, critic_params, batch, num_micro, *self._frozen
      )
      batch = batch._replace(value_t=values, next_value_t=after)
    for update in range(self._settings.updates_per_batch):
      if self._averaged:
        batch = self._proximal(self._state.average['params'], batch, num_micro, *self._frozen)
      elif self._score_proximal and update == 0:
        batch = self._proximal(self._state.params, batch, num_micro, *self._frozen)
      self._state, scalars = self._step(self._state, batch, num_micro, *self._frozen)
    self._version += 1
    version = multihost.place(np.int32(self._version), self._replicated)
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
    return self._score_under(self._state.params, groups)

  def _score_under(
    self, params: Any, groups: Sequence[Group]
  ) -> tuple[tuple[np.ndarray, ...], ...]:
    packed = self._pack(groups, [np.zeros(len(g.trajectories), np.float32) for g in groups])
    batch, num_micro = self._place(packed)
    if params is self._anchor:
      batch = batch._replace(experts=None)
    scores = self._score(params, batch, num_micro, *self._frozen)
    scores = multihost.fetch(scores)
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

  def _pack_to_train(self, groups: Sequence[Group]) -> PackedBatch:
    """Rows with advantages, without the trajectories that shaping takes out of the loss."""
    batch = reward_batch.from_groups(groups)
    if 'host_scores' in self._objective.tags:
      batch = dataclasses.replace(
        batch,
        log_probs_t=_trained(groups, self._score_under(self._state.params, groups)),
        anchor_log_probs_t=_trained(groups, self._score_under(self._anchor, groups)),
      )
    found = advantages_of(self._objective, batch, self._host_state)
    self._host_state = found.state
    ends = np.cumsum([len(group.trajectories) for group in groups])
    parts = [slice(end - len(g.trajectories), end) for g, end in zip(groups, ends, strict=True)]
    kept = [_without(g, found.keep[part]) for g, part in zip(groups, parts, strict=True)]
    advantages = [
      [adv if keep else 0.0 for adv, keep in zip(found.adv_t[p], found.keep[p], strict=True)]
      for p in parts
    ]
    return self._pack(kept, advantages, [found.reward[part] for part in parts])

  def _pack(self, groups, advantages, rewards=None) -> PackedBatch:
    plan = self._settings.rows
    packed = packing.pack_groups(
      groups,
      advantages,
      row_shapes=[plan.shape],
      rows_multiple=plan.micro_batch_rows,
      rewards=rewards,
      bootstrap=self._critic is not None and self._critic.bootstrap,
      weigh_places=self._config.num_experts > 0,
    )
    wanted = (self._config.num_layers, self._config.experts_per_token)
    if packed.experts is not None and packed.experts.shape[2:] != wanted:
      raise DataError(
        f'experts of {packed.experts.shape[2:]} layers and choices were recorded, this model has {wanted}. Take '
        'trajectories of the same model.'
      )
    return packed

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
    multihost.meet(
      f'batch {self._version}',
      word=multihost.digest(cut),
      deadline_s=self._settings.meeting_deadline_s,
    )
    batch = multihost.place(cut, rows_sharding(self._mesh))
    return batch, multihost.place(np.int32(num_micro), self._replicated)


def _trained(
  groups: Sequence[Group], scores: Sequence[Sequence[np.ndarray]]
) -> tuple[np.ndarray, ...]:
  """The scores of trained tokens alone, one array per trajectory of the batch."""
  return tuple(
    score[trajectory.mask_t]
    for group, of_group in zip(groups, scores, strict=True)
    for trajectory, score in zip(group.trajectories, of_group, strict=True)
  )


def _without(group: Group, keep: np.ndarray) -> Group:
  """The group with nothing to train on in the trajectories that are not kept."""
  if keep.all():
    return group
  trajectories = tuple(
    t if kept else dataclasses.replace(t, mask_t=np.zeros_like(t.mask_t))
    for t, kept in zip(group.trajectories, keep, strict=True)
  )
  return dataclasses.replace(group, trajectories=trajectories)


@functools.partial(jax.jit, static_argnames='dtype')
def _copy(params: Any, dtype: Any) -> Any:
  """A copy that shares no buffer with `params`."""
  return jax.tree.map(lambda leaf: jnp.copy(leaf).astype(dtype), params)
