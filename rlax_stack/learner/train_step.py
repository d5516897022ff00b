"""One optimizer step over a packed batch, as one jit over the mesh.

Not for packing, and nothing here waits for the device. Invariants: every mean is summed over
micro-batches and divided once by the global count; the step computes the same update however the
batch is cut into micro-batches and rows; an update with a non-finite loss or gradient leaves
parameters and moments, the critic's too, as they were.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.learner import critic as critics
from rlax_stack.learner.gradient_norms import squared_gradient_norms
from rlax_stack.learner.optimizer import (
  DTYPES,
  OptimizerSettings,
  learning_rate_schedule,
  make_optimizer,
  scaled_update,
)
from rlax_stack.learner.scoring import (
  ForwardSettings,
  batch_load,
  head_log_probs,
  micro_batch,
  row_states,
  row_states_and_router,
  rows_sharding,
  score_batch,
  weight_shapes,
)
from rlax_stack.learner.state import (
  LearnerState,
  abstract_state,
  averaged,
  state_shardings,
  updates_applied,
)
from rlax_stack.models import decoder
from rlax_stack.models.adapter import model_weights
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.critics.networks import CriticSettings
from rlax_stack.objectives.critics.value_loss import value_loss, value_metrics
from rlax_stack.objectives.inputs import LossInputs, LossParts, added
from rlax_stack.objectives.loss import Prepared, loss_inputs, policy_loss, prepare
from rlax_stack.objectives.metrics import finished
from rlax_stack.objectives.objective import Objective
from rlax_stack.objectives.router import (
  NO_ROUTER_LOSS,
  RouterLoss,
  RouterSums,
  router_loss,
  router_metrics,
)
from rlax_stack.objectives.vocabulary import current_terms
from rlax_stack.sharding import param_shardings
from rlax_stack.types import PackedBatch

TrainStep = Callable[..., tuple[LearnerState, dict[str, Any]]]


class _Total(NamedTuple):
  """What micro-batches add up to."""

  gradient: Any  # float32, the tree differentiated by
  parts: LossParts
  router: RouterSums | None = None  # of a mixture of experts


class _Routed(NamedTuple):
  """What the router's losses divide and multiply by, of the whole batch."""

  tokens: jax.Array  # float32
  load: jax.Array | None  # float32 [L, E], where tokens are to be spread evenly


@functools.lru_cache(maxsize=8)
def make_train_step(
  config: ModelConfig,
  mesh: Mesh,
  *,
  forward: ForwardSettings,
  objective: Objective,
  optimizer: OptimizerSettings,
  score_proximal: bool = False,
  router: RouterLoss = NO_ROUTER_LOSS,
) -> TrainStep:
  """The train step, compiled at its first call and shared by equal arguments.

  The number of micro-batches is an argument, not a shape: one program serves every batch of a run.

  Args:
    config: shape of the model.
    mesh: where rows and parameters live.
    forward: see ForwardSettings.
    objective: see Objective.
    optimizer: see OptimizerSettings.
    score_proximal: True reads `proximal_log_probs_t` from the batch; False takes the current policy
      itself as the proximal one (one update per batch: the ratio is exactly 1).
    router: losses of a mixture of experts, whose batches need `place_weight`.

  Returns: function (state, batch of [M, rows, ...] arrays, num_micro int32 scalar) -> (state,
    metrics). The state given is donated. Micro-batches from num_micro on are not computed; they
    must be masked. `metrics` are float32 scalars on the device. With an adapter (`forward.adapter`) the state
    holds the adapter, and the frozen weights are a fourth argument.
  """
  step = _Step(config, mesh, forward, objective, optimizer, score_proximal, router)
  params, frozen = weight_shapes(config, forward)
  policy = decoder.abstract_params(config) if forward.adapter else None
  makers = objective.init_state, critics.make_state(objective.critic_settings, optimizer, policy)
  average = objective.average_decay is not None
  shapes = abstract_state(params, make_optimizer(optimizer), mesh, *makers, average)
  shardings = state_shardings(shapes, mesh)
  replicated = NamedSharding(mesh, PartitionSpec())
  return jax.jit(
    step.step,
    in_shardings=(shardings, rows_sharding(mesh), replicated, *param_shardings(frozen, mesh)),
    out_shardings=(shardings, replicated),
    donate_argnums=0,
  )


@dataclasses.dataclass(frozen=True)
class _Step:
  """The step as a function of state and batch; arguments as `make_train_step`."""

  config: ModelConfig
  mesh: Mesh
  forward: ForwardSettings
  objective: Objective
  optimizer: OptimizerSettings
  score_proximal: bool
  router: RouterLoss

  def step(
    self, state: LearnerState, batch: PackedBatch, num_micro: jax.Array, *frozen: Any
  ) -> tuple[LearnerState, dict[str, Any]]:
    """One update of the policy, and those of its critic."""
    prepared = self._prepared(state, batch, num_micro, frozen)
    mixture = bool(self.config.num_experts)
    routed = self._routed(state, batch, num_micro, frozen) if mixture else None

    def part(trained, index):
      params, critic_params = trained
      model = model_weights(self.forward.adapter, params, *frozen)
      rows, cut = micro_batch(batch, index), _cut(prepared, index)
      out, sums = self._part(model, critic_params, state, rows, cut, routed)
      return out.loss, (out, sums)

    def value_part(critic_params, index):
      out = self._value_part(critic_params, None, micro_batch(batch, index), _cut(prepared, index))
      return out.loss, (out, None)

    dtype = DTYPES[self.optimizer.gradient_dtype]
    accumulate = functools.partial(_accumulate, num_micro=num_micro, dtype=dtype)
    total = accumulate(part, (state.params, state.critic.get('params', {})))
    settings, found = self.objective.critic_settings, {}
    critic, norm = {}, jnp.float32(0.0)
    if settings is not None:
      further = functools.partial(accumulate, value_part)
      first = total.gradient[1]
      critic, norm = _critic_updates(settings, self.optimizer, state.critic, first, further)
      values, targets = prepared.tokens['value_t'], prepared.tokens['target_t']
      found = value_metrics(values, targets, batch.mask_t) | {'critic_grad_norm': norm}
    if routed is not None and total.router is not None:
      found |= router_metrics(total.router, routed.tokens)
    state, metrics = self._apply(state, critic, jnp.isfinite(norm), total, prepared)
    return state, metrics | found

  def _loss_inputs(self, state: LearnerState, batch: PackedBatch, scored: Any) -> LossInputs:
    return loss_inputs(batch, scored, version=state.version, score_proximal=self.score_proximal)

  def _prepared(
    self, state: LearnerState, batch: PackedBatch, num_micro: jax.Array, frozen: tuple[Any, ...]
  ) -> Prepared:
    """What the whole batch says, scored under the current weights where a box wants that."""
    objective, model = self.objective, (self.config, batch, num_micro, self.forward, self.mesh)
    scored, norms = None, None
    if objective.needs_scores:
      held = model_weights(self.forward.adapter, jax.lax.stop_gradient(state.params), *frozen)
      terms = current_terms(objective, score_proximal=self.score_proximal, statistics=True)
      scored = score_batch(held, *model, terms)
    if objective.needs_gradient_norms:
      norms = squared_gradient_norms(state.params, *model, *frozen)
    return prepare(objective, self._loss_inputs(state, batch, scored), state.objective, norms)

  def _routed(
    self, state: LearnerState, batch: PackedBatch, num_micro: jax.Array, frozen: tuple[Any, ...]
  ) -> _Routed:
    """The tokens of the batch and, where they are to be spread evenly, who gets them now."""
    load = None
    if self.router.aux_coef:
      held = model_weights(self.forward.adapter, jax.lax.stop_gradient(state.params), *frozen)
      load = batch_load(held, self.config, batch, num_micro, self.forward, self.mesh)
    return _Routed(jnp.sum(batch.place_weight), load)

  def _part(
    self,
    params: Any,
    critic_params: Any,
    state: LearnerState,
    rows: PackedBatch,
    prepared: Prepared,
    routed: _Routed | None,
  ) -> tuple[LossParts, RouterSums | None]:
    """The loss of one micro-batch by the parameters of policy and critic."""
    model, sums = (params, self.config, rows, self.forward, self.mesh), None
    if routed is None:
      hidden = row_states(*model)
    else:
      hidden, sums = row_states_and_router(*model)
    terms = current_terms(self.objective, score_proximal=self.score_proximal)
    scored = head_log_probs(params, self.config, hidden, rows, self.forward, self.mesh, terms)
    inputs = self._loss_inputs(state, rows, scored)
    out = policy_loss(self.objective, inputs, prepared, state.objective)
    if routed is not None and sums is not None:
      more = router_loss(self.router, sums, routed.load, routed.tokens)
      out = out._replace(loss=out.loss + more)
    if self.objective.critic is None:
      return out, sums
    values = self._value_part(critic_params, hidden, rows, prepared)
    return out._replace(loss=out.loss + values.loss, means=out.means | values.means), sums

  def _value_part(
    self, critic_params: Any, hidden: Any, rows: PackedBatch, prepared: Prepared
  ) -> LossParts:
    """The value loss of one micro-batch; `hidden` of the policy, for a critic that shares it."""
    critic = self.objective.critic_settings
    if critic is None:
      raise ValueError('there is no critic.')
    value = critics.row_values(
      critic, critic_params, hidden, self.config, rows, self.forward, self.mesh
    )
    return value_loss(
      critic,
      critics.values_before(value, rows),
      prepared.tokens['value_t'],
      prepared.tokens['target_t'],
      rows.mask_t,
      prepared.denominators.tokens,
    )

  def _apply(self, state, critic, critic_finite, total, prepared):
    """Updates the state, or leaves all but the counters alone where something is not finite."""
    objective, settings = self.objective, self.objective.critic_settings
    schedule, scale = learning_rate_schedule(self.optimizer), prepared.step_scale
    gradient, loss = total.gradient[0], total.parts.loss
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm) & critic_finite
    pretraining = 0 if settings is None else settings.pretrain_updates
    applied = updates_applied(state)
    moves = finite & (applied >= pretraining)
    updates, opt_state = scaled_update(
      self.optimizer, gradient, state.opt_state, state.params, scale
    )
    with jax.numpy_dtype_promotion('standard'):
      learning_rate = jnp.where(applied < pretraining, 0.0, schedule(applied - pretraining))
    params = optax.apply_updates(state.params, updates)
    measured = finished(total.parts)
    carried = objective.update_state(state.objective, measured | {'loss': loss})
    average, decay = state.average, objective.average_decay
    if decay is not None:
      average = averaged(average, params, decay)
    # A select on every leaf fuses into the update; no branch, no wait for the host.
    params, opt_state, carried, average = _chosen(
      moves,
      (params, opt_state, carried, average),
      (state.params, state.opt_state, state.objective, state.average),
    )
    bad = jnp.where(finite, 0, 1)
    new_state = LearnerState(
      params=params,
      opt_state=opt_state,
      version=state.version,
      step=state.step + 1,
      skipped=state.skipped + bad,
      skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
      objective=carried,
      critic=_chosen(finite, critic, state.critic),
      average=average,
    )
    metrics = (
      measured
      | {
        'loss': loss,
        'grad_norm': norm,
        'learning_rate': learning_rate,
        'trained_tokens': prepared.denominators.tokens,
        'skipped': new_state.skipped,
        'skipped_in_row': new_state.skipped_in_row,
      }
      | ({} if scale is None else {'step_scale': scale})
    )
    return new_state, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)


def _accumulate(part: Callable, params: Any, *, num_micro: jax.Array, dtype: Any) -> _Total:
  """Adds up loss, gradient and metrics of `part(params, index)` over the micro-batches in use.

  The sum of the gradients is kept in `dtype` between micro-batches, and returned in float32.
  """

  def add(total, gradient):
    return (total.astype(jnp.float32) + gradient.astype(jnp.float32)).astype(dtype)

  def body(index, total):
    (_, (out, sums)), gradient = jax.value_and_grad(part, has_aux=True)(params, index)
    gradient = jax.tree.map(add, total.gradient, gradient)
    return _Total(gradient, added(total.parts, out), jax.tree.map(jnp.add, total.router, sums))

  def nothing(tree, dtype):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), tree)

  _, (out, sums) = jax.eval_shape(lambda: part(params, jnp.int32(0)))
  zeros = _Total(nothing(params, dtype), *nothing((out, sums), jnp.float32))
  total = jax.lax.fori_loop(0, num_micro, body, zeros)
  return total._replace(gradient=jax.tree.map(lambda x: x.astype(jnp.float32), total.gradient))


def _critic_updates(
  critic: CriticSettings,
  optimizer: OptimizerSettings,
  state: Any,
  gradient: Any,
  further: Callable[[Any], _Total],
) -> tuple[Any, jax.Array]:
  """The critic's state after its updates of this step, the first of them with `gradient`.

  `further(params)` gives the gradient of the others. Returns it with the mean norm of all gradients.
  """
  transform = make_optimizer(critics.critic_optimizer(critic, optimizer))

  def once_more(_, carry):
    moved, norm = carry
    moved, one = critics.updated(critic, transform, further(moved['params']).gradient, moved)
    return moved, norm + one

  carry = critics.updated(critic, transform, gradient, state)
  if critic.updates > 1:
    carry = jax.lax.fori_loop(1, critic.updates, once_more, carry)
  return carry[0], carry[1] / critic.updates


def _cut(prepared: Prepared, index: jax.Array) -> Prepared:
  """What is prepared, for micro-batch `index` alone."""
  return prepared._replace(tokens=micro_batch(prepared.tokens, index))


def _chosen(moves: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(moves, a, b), new, old)
