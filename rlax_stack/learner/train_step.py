"""One optimizer step over a packed batch, as one jit over the mesh.

Not for packing, and nothing here waits for the device. Invariants: every mean is summed over
micro-batches and divided once by the global count; the step computes the same update however the
batch is cut into micro-batches and rows; an update with a non-finite loss or gradient leaves
parameters and moments as they were.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.learner.optimizer import OptimizerSettings, learning_rate_schedule, make_optimizer
from rlax_stack.learner.scoring import (
  ForwardSettings,
  micro_batch,
  rows_sharding,
  target_log_probs,
)
from rlax_stack.learner.state import LearnerState, abstract_state, state_shardings, updates_applied
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.aggregation import Mean, token_weights
from rlax_stack.objectives.loss import Denominators, LossInputs, PolicyLoss, policy_loss
from rlax_stack.pallas_kernels.fused_log_prob import FusedLogProb
from rlax_stack.types import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
  """Which loss: see `objectives.loss.policy_loss`.

  aggregation: 'token_mean' or 'sequence_mean'. score_proximal: True reads `proximal_log_probs_t`
  from the batch; False takes the current policy itself as the proximal one (one update per batch:
  the ratio is exactly 1).
  """

  clip_low: float = 0.2
  clip_high: float = 0.28
  aggregation: str = 'token_mean'
  correction_cap: float | None = None
  kl_coef: float = 0.0
  kl_estimator: str = 'k3_plus'
  entropy_coef: float = 0.0
  score_proximal: bool = False


TrainStep = Callable[[LearnerState, PackedBatch, jax.Array], tuple[LearnerState, dict[str, Any]]]


class _Total(NamedTuple):
  """What micro-batches add up to: sums, and a maximum for `ratio_max`."""

  gradient: Any  # float32, the parameters' tree
  loss: jax.Array
  metrics: dict[str, Mean]
  ratio_max: jax.Array


@functools.lru_cache(maxsize=8)
def make_train_step(
  config: ModelConfig,
  mesh: Mesh,
  *,
  forward: ForwardSettings,
  loss: LossSettings,
  optimizer: OptimizerSettings,
) -> TrainStep:
  """The train step, compiled at its first call and shared by equal arguments.

  The number of micro-batches is an argument, not a shape: one program serves every batch of a run.

  Args:
    config: shape of the model.
    mesh: where rows and parameters live.
    forward: see ForwardSettings.
    loss: see LossSettings.
    optimizer: see OptimizerSettings.

  Returns: function (state, batch of [M, rows, ...] arrays, num_micro int32 scalar) -> (state,
    metrics). The state given is donated. Micro-batches from num_micro on are not computed; they
    must be masked. `metrics` are float32 scalars on the device.
  """
  transform, schedule = make_optimizer(optimizer), learning_rate_schedule(optimizer)

  def step(state, batch, num_micro):
    weight_t, denominators = _global_weights(batch, loss.aggregation)

    def part(params, index):
      rows, weight = micro_batch(batch, index), micro_batch(weight_t, index)
      scored = target_log_probs(params, config, rows, forward, mesh)
      out = _policy_loss(scored, rows, weight, denominators, loss)
      return out.loss, out

    total = _accumulate(part, state.params, num_micro)
    return _apply(state, total, denominators, transform, schedule)

  shapes = abstract_state(decoder.abstract_params(config), transform, mesh)
  shardings = state_shardings(shapes, mesh)
  replicated = NamedSharding(mesh, PartitionSpec())
  return jax.jit(
    step,
    in_shardings=(shardings, rows_sharding(mesh), replicated),
    out_shardings=(shardings, replicated),
    donate_argnums=0,
  )


def _accumulate(part: Callable, params: Any, num_micro: jax.Array) -> _Total:
  """Adds up value, gradient and metrics of `part(params, index)` over the micro-batches in use."""

  def body(index, total):
    (_, out), gradient = jax.value_and_grad(part, has_aux=True)(params, index)
    gradients, losses, metrics = jax.tree.map(
      jnp.add, (total.gradient, total.loss, total.metrics), (gradient, out.loss, out.metrics)
    )
    return _Total(gradients, losses, metrics, jnp.maximum(total.ratio_max, out.ratio_max))

  _, out = jax.eval_shape(lambda: part(params, jnp.int32(0)))
  shapes = _Total(params, out.loss, out.metrics, out.ratio_max)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
  return jax.lax.fori_loop(0, num_micro, body, zeros)


def _policy_loss(
  scored: FusedLogProb,
  rows: PackedBatch,
  weight_t: jax.Array,
  denominators: Denominators,
  settings: LossSettings,
) -> PolicyLoss:
  """The share of one micro-batch in the loss of the batch."""
  held = jax.lax.stop_gradient(scored)
  inputs = LossInputs(
    log_probs_t=scored.log_prob,
    entropy_t=scored.entropy if settings.entropy_coef else held.entropy,
    proximal_log_probs_t=(rows.proximal_log_probs_t if settings.score_proximal else held.log_prob),
    behaviour_log_probs_t=rows.behaviour_log_probs_t,
    anchor_log_probs_t=rows.anchor_log_probs_t,
    adv_t=rows.adv_t,
    mask_t=rows.mask_t,
    weight_t=weight_t,
  )
  return policy_loss(
    inputs,
    denominators,
    clip_low=settings.clip_low,
    clip_high=settings.clip_high,
    correction_cap=settings.correction_cap,
    kl_coef=settings.kl_coef,
    kl_estimator=settings.kl_estimator,
    entropy_coef=settings.entropy_coef,
  )


def _global_weights(batch: PackedBatch, aggregation: str) -> tuple[jax.Array, Denominators]:
  """Weight of every token and the denominators, from the whole batch, before it is cut."""
  weight_t = token_weights(
    batch.mask_t,
    batch.trajectory_t,
    aggregation=aggregation,
    num_trajectories=batch.mask_t.size,
  )
  tokens = jnp.sum(batch.mask_t.astype(jnp.float32))
  return weight_t, Denominators(policy=jnp.sum(weight_t), tokens=tokens)


def _apply(state, total, denominators, transform, schedule):
  """Updates the state, or leaves parameters and moments alone where something is not finite."""
  gradient, loss = total.gradient, total.loss
  norm = optax.tree.norm(gradient)
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  # optax mixes its int32 counters with float32, which strict promotion refuses.
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = transform.update(gradient, state.opt_state, state.params)
    learning_rate = schedule(updates_applied(state))
  params = optax.apply_updates(state.params, updates)
  # A select on every leaf fuses into the update; no branch, no wait for the host.
  params, opt_state = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old),
    (params, opt_state),
    (state.params, state.opt_state),
  )
  bad = jnp.where(finite, 0, 1)
  new_state = LearnerState(
    params=params,
    opt_state=opt_state,
    version=state.version,
    step=state.step + 1,
    skipped=state.skipped + bad,
    skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
  )
  metrics = {name: pair.numerator / pair.denominator for name, pair in total.metrics.items()} | {
    'loss': loss,
    'grad_norm': norm,
    'ratio_max': total.ratio_max,
    'learning_rate': learning_rate,
    'trained_tokens': denominators.tokens,
    'skipped': new_state.skipped,
    'skipped_in_row': new_state.skipped_in_row,
  }
  return new_state, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)
