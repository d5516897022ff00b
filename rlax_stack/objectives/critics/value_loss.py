"""The loss of a critic's values, and what is measured of them.

Not for targets (advantages/critic.py). Invariant: the targets and the values at the start of the
batch are held; masked places are 0 in value and gradient.
"""

import jax
import jax.numpy as jnp

from rlax_stack.objectives.aggregation import masked_mean
from rlax_stack.objectives.critics.networks import CriticSettings
from rlax_stack.objectives.inputs import LossParts


def value_loss(
  settings: CriticSettings,
  value_t: jax.Array,
  start_value_t: jax.Array,
  target_t: jax.Array,
  mask_t: jax.Array,
  tokens: jax.Array,
) -> LossParts:
  """The share of one micro-batch in the value loss; the boxes of the table have the formula.

  The metric `value_loss` is without the coefficient.

  Args:
    settings: see CriticSettings.
    value_t: V, float32 [rows, N], with gradient.
    start_value_t: V°, float32, the same shape.
    target_t: V̂, float32, the same shape.
    mask_t: bool, True where trained on.
    tokens: N of the whole batch, float32 scalar.
  """
  start, target = (jax.lax.stop_gradient(x) for x in (start_value_t, target_t))
  # Before the squares: a masked NaN would leak through the gradient of a square masked afterwards.
  error = jnp.where(mask_t, value_t - target, 0.0)
  half_square = 0.5 * error * error
  clipped = jnp.zeros(mask_t.shape, bool)
  if settings.delta_value > 0:
    delta = settings.delta_value
    moved = jnp.where(mask_t, value_t - start, 0.0)
    bounded = jnp.where(mask_t, start + jnp.clip(moved, -delta, delta) - target, 0.0)
    clipped = mask_t & (jnp.abs(bounded) > jnp.abs(error))
    half_square = jnp.where(clipped, 0.5 * bounded * bounded, half_square)
  means = {
    'value_loss': masked_mean(half_square, mask_t),
    'value_clip_fraction': masked_mean(clipped, mask_t),
  }
  loss = settings.coef * jnp.sum(half_square) / jnp.maximum(tokens, 1.0)
  return LossParts(loss, jax.lax.stop_gradient(means), {}, {})


def value_metrics(
  value_t: jax.Array, target_t: jax.Array, mask_t: jax.Array
) -> dict[str, jax.Array]:
  """How well the values at the start of the batch foretold its targets; float32 scalars.

  explained_variance = 1 − Var(V̂ − V) / Var(V̂), over trained tokens: 1 is perfect, 0 no better than
  a constant; 0 where the targets do not differ.

  Args:
    value_t: float32 [M, rows, N], of the whole batch, as all that follow.
    target_t: float32.
    mask_t: bool.
  """
  count = jnp.maximum(jnp.sum(mask_t.astype(jnp.float32)), 1.0)

  def mean(x):
    return jnp.sum(jnp.where(mask_t, x, 0.0)) / count

  def variance(x):
    return mean(jnp.square(x - mean(x)))

  spread = variance(target_t)
  unexplained = variance(target_t - value_t) / jnp.where(spread > 0, spread, 1.0)
  return {
    'value_mean': mean(value_t),
    'value_target_mean': mean(target_t),
    'explained_variance': jnp.where(spread > 0, 1.0 - unexplained, 0.0),
  }
