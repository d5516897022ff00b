"""KL to an anchor policy, estimated from the log-probs of the sampled tokens.

Not a reward penalty. Invariant: masked tokens are 0 in value and gradient.
"""

import jax
import jax.numpy as jnp

from rlax_stack.errors import ConfigError
from rlax_stack.objectives.trust_region import log_ratio

KL_ESTIMATORS = ('k1', 'k2', 'k3', 'k3_plus')


def kl_estimate(
  log_probs_t: jax.Array,
  anchor_log_probs_t: jax.Array,
  mask_t: jax.Array,
  *,
  estimator: str = 'k3_plus',
) -> jax.Array:
  """Per-token estimate of KL(π ‖ anchor), d = log π − log π_anchor.

  k1: d    k2: d²/2    k3: e^(−d) − 1 + d    k3_plus: the value of k3 with the gradient of k2

  Divided by: the number of mask_t tokens in the global batch, whatever the policy loss is divided
  by (by the caller).
  Gradient flows through: log_probs_t only. The gradient of k1 has mean zero (useless as a loss),
  that of k3 is biased; that of k2, and so of k3_plus, is the gradient of the KL on policy.
  See "Approximating KL Divergence", Schulman (http://joschu.net/blog/kl-approx.html).

  Args:
    log_probs_t: of the current policy, any float dtype, any shape.
    anchor_log_probs_t: of the anchor, the same shape.
    mask_t: True where counted.
    estimator: one of KL_ESTIMATORS.

  Returns: float32, the same shape.

  Raises:
    ConfigError: an unknown estimator.
  """
  d = log_ratio(log_probs_t, jax.lax.stop_gradient(anchor_log_probs_t), mask_t)
  if estimator == 'k1':
    return d
  if estimator == 'k2':
    return 0.5 * d * d
  if estimator == 'k3':
    return jnp.expm1(-d) + d
  if estimator == 'k3_plus':
    k2 = 0.5 * d * d
    held = jax.lax.stop_gradient(d)
    return k2 + (jnp.expm1(-held) + held - jax.lax.stop_gradient(k2))
  raise ConfigError(f'unknown KL {estimator=}. Set it to one of {KL_ESTIMATORS}.')
