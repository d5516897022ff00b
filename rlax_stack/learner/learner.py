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
from rlax_stack.learner.directions import averaged_weights, schedule_free_state
from rlax_stack.learner.group_parts import of_trained_tokens, without
from rlax_stack.learner.optimizer import make_optimizer
from rlax_stack.learner.other_context import OtherContext
from rlax_stack.learner.prepared import PreparedBatch
from rlax_stack.learner.scoring import make_proximal_score, make_score, rows_sharding
from rlax_stack.learner.settings import ANCHORED, LearnerSettings, check_mixture
from rlax_stack.learner.state import LearnerState, abstract_state, init_state
from rlax_stack.learner.step_clock import StepClock, StepMetrics
from rlax_stack.learner.teacher import Teacher, make_teacher_score
from rlax_stack.learner.train_step import make_train_step
from rlax_stack.models import decoder
from rlax_stack.models.adapter import init_adapter
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.frozen import freeze
from rlax_stack.objectives import reward_batch
from rlax_stack.objectives.host import advantages_of
from rlax_stack.sharding import param_shardings
from rlax_stack.types import Group, PackedBatch


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
    teacher: scored where the objective asks for it, see learner/teacher.py.
    other_context: what the teacher, or without one the policy itself, scores the samples in instead of their own.
  """

  def __init__(
    self,
    config: ModelConfig,
    params: Any,
    settings: LearnerSettings,
    mesh: Mesh,
    *,
    teacher: Teacher | None = None,
    other_context: OtherContext | None = None,
  ):
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
    self._version, self._other_context = 0, other_context
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
    self._teacher_score = make_teacher_score(
      teacher, config, settings, mesh, needed=other_context is None
    )
    if self._critic is not None:
      self._score_values = critics.make_value_score(config, mesh, settings.forward, self._critic)
    self._capacity = settings.rows.max_micro_batches
    # Under an adapter this is a fresh one, which changes nothing: the anchor is the frozen weights themselves.
    anchored = self._objective.tags & ANCHORED
    self._anchor = _copy(self._state.params, None, jnp.float32) if anchored else None
    self._last: StepMetrics | None = None
    self._prepared: PreparedBatch | None = None

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
    """A copy of what is to be published, in `dtype`, with its shardings.

    `params`, or the average of them that schedule_free keeps. It outlives the next `train`.
    """
    return _copy(self._state.params, schedule_free_state(self._state.opt_state), dtype)

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

  @multihost.naming_who_is_gone()
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
    clock = StepClock()
    prepared, self._prepared = self._prepared, None
    ahead = prepared is not None and prepared.is_of(groups, self._host_state)
    if prepared is None or not ahead:
      prepared = self._prepare(groups, clock)
    self._host_state, stats = prepared.host_state, prepared.stats | {'prepared_ahead': ahead}
    batch, num_micro = prepared.batch, prepared.num_micro
    deadline_s = self._settings.meeting_deadline_s
    multihost.meet(f'batch {self._version}', word=prepared.digest, deadline_s=deadline_s)
    clock.done('data')
    if self._anchor is not None and 'anchor' in self._objective.tags:
      # The anchor is another policy, whose routers are its own.
      bare = batch._replace(experts=None)
      scores = self._score(self._anchor, bare, num_micro, *self._frozen)
      clock.dispatched('log_probs', scores)
      batch = batch._replace(anchor_log_probs_t=scores)
    if 'teacher' in self._objective.tags:
      scores = self._taught(prepared)
      clock.dispatched('log_probs', scores)
      batch = batch._replace(teacher_log_probs_t=scores)
    if self._critic is not None:
      critic_params = self._state.critic['params']
      values, after = self._score_values(
        self._state.params, critic_params, batch, num_micro, *self._frozen
      )
      clock.dispatched('log_probs', after)
      batch = batch._replace(value_t=values, next_value_t=after)
    for update in range(self._settings.updates_per_batch):
      if self._averaged or (self._score_proximal and update == 0):
        proximal = self._state.average['params'] if self._averaged else self._state.params
        batch = self._proximal(proximal, batch, num_micro, *self._frozen)
        clock.dispatched('log_probs', batch.proximal_log_probs_t)
      self._state, scalars = self._step(self._state, batch, num_micro, *self._frozen)
      clock.dispatched('train', scalars['loss'])
    self._version += 1
    version = multihost.place(np.int32(self._version), self._replicated)
    self._state = self._state._replace(version=version)
    self._last = StepMetrics(scalars, {k: float(v) for k, v in stats.items()}, clock)
    return self._last

  def _taught(self, prepared: PreparedBatch) -> jax.Array:
    """Scores of the teacher, or of the policy as its own, where it has a context of its own or in the samples'."""
    score, other = self._teacher_score, prepared.other
    if score is None:
      score = lambda *rows: self._score(self._state.params, *rows, *self._frozen)  # noqa: E731
    if other is None:
      return score(prepared.batch, prepared.num_micro)
    return other.in_place(score(other.batch, other.num_micro))

  def prepare(self, groups: Sequence[Group]) -> bool:
    """Packs a batch that is likely to be the next one and copies it, while the devices are at work on the last.

    `train` takes it where the same groups come, and forgets it otherwise: no value depends on whether this was called.

    Returns: False where the objective wants scores under the weights that are yet to come.
    """
    if 'host_scores' in self._objective.tags:
      return False
    self._prepared = self._prepare(groups)
    return True

  def _prepare(self, groups: Sequence[Group], clock: StepClock | None = None) -> PreparedBatch:
    packed, host_state = self._pack_to_train(groups, clock)
    stats = packing.packing_stats(packed)
    stats |= {'pairs_per_layer': packing.pairs_per_layer(packed, self._config)}
    batch, num_micro = self._place(packed)
    other = self._other_context
    return PreparedBatch(
      groups=tuple(groups),
      state_before=self._host_state,
      host_state=host_state,
      stats=stats,
      digest=multihost.digest(packed),
      batch=batch,
      num_micro=num_micro,
      other=other and other.rows_of(groups, packed, batch.mask_t.shape, self._mesh),
    )

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

  @multihost.naming_who_is_gone()
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

  def _pack_to_train(
    self, groups: Sequence[Group], clock: StepClock | None = None
  ) -> tuple[PackedBatch, dict[str, Any]]:
    """Rows with advantages, without the trajectories that shaping takes out of the loss; the host state after them."""
    batch = reward_batch.from_groups(groups)
    if 'host_scores' in self._objective.tags:
      batch = dataclasses.replace(
        batch,
        log_probs_t=of_trained_tokens(groups, self._score_under(self._state.params, groups)),
        anchor_log_probs_t=of_trained_tokens(groups, self._score_under(self._anchor, groups)),
      )
      if clock is not None:
        clock.done('log_probs')
    found = advantages_of(self._objective, batch, self._host_state)
    ends = np.cumsum([len(group.trajectories) for group in groups])
    parts = [slice(end - len(g.trajectories), end) for g, end in zip(groups, ends, strict=True)]
    kept = [without(g, found.keep[part]) for g, part in zip(groups, parts, strict=True)]
    advantages = [
      [adv if keep else 0.0 for adv, keep in zip(found.adv_t[p], found.keep[p], strict=True)]
      for p in parts
    ]
    return self._pack(kept, advantages, [found.reward[part] for part in parts]), found.state

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
    batch = multihost.place(cut, rows_sharding(self._mesh))
    return batch, multihost.place(np.int32(num_micro), self._replicated)


@functools.partial(jax.jit, static_argnames='dtype')
def _copy(params: Any, schedule_free: Any, dtype: Any) -> Any:
  """A copy that shares no buffer with `params`, or the average where there is one."""
  if schedule_free is not None:
    params = averaged_weights(schedule_free, params)
  return jax.tree.map(lambda leaf: jnp.copy(leaf).astype(dtype), params)
