"""KL to an anchor policy, estimated from the log-probs of the sampled tokens.

Not a reward penalty. Invariant: masked tokens are 0 in value and gradient.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Penalty

Estimator = Literal['k1', 'k2', 'k3', 'k3_plus']


def kl_anchor(
  inputs: LossInputs,
  *,
  coef: Annotated[float, Range(0.0)] = 0.001,
  estimator: Estimator = 'k3_plus',
) -> Penalty:
  """KL(π ‖ anchor) as a term of the loss; d = log π − log π_anchor.

  Lₜ = β·kₜ,  k1: d    k2: d²/2    k3: e^(−d) − 1 + d    k3_plus: the value of k3, gradient of k2

  Divided by: the trained tokens of the batch, whatever the policy loss is divided by.
  Gradient flows through: log_probs_t only. The gradient of k1 has mean zero (useless as a loss),
  that of k3 is biased; that of k2, and so of k3_plus, is the gradient of the KL on policy.
  See "Approximating KL Divergence", Schulman (http://joschu.net/blog/kl-approx.html).

  Args:
    inputs: [rows, N].
    coef: β.
    estimator: see above.
  """
  d = ratios.log_ratio(inputs.log_probs_t, inputs.anchor_log_probs_t, inputs.mask_t)
  kl_t = _estimate(d, estimator)
  return Penalty(coef * kl_t, metrics={'kl_anchor': kl_t})


def _estimate(d: jax.Array, estimator: Estimator) -> jax.Array:
  k2 = 0.5 * d * d
  if estimator == 'k1':
    return d
  if estimator == 'k2':
    return k2
  bounded = jnp.clip(d, -ratios.MAX_LOG_RATIO, ratios.MAX_LOG_RATIO)
  k3 = jnp.expm1(-bounded) + d
  if estimator == 'k3':
    return k3
  return k2 + jax.lax.stop_gradient(k3 - k2)


TABLE = {
  'kl_anchor': Box(
    kl_anchor, formula='+ {coef:g}·KL(π‖anchor; {estimator})', tags=frozenset({'anchor'})
  ),
}
