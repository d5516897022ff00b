"""Off-policy corrections: weights that turn an expectation under the behaviour policy into one
under the proximal.

Not a trust region: the weights carry no gradient and take no token out of a denominator. Invariant:
masked tokens have weight exactly 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.objectives.trust_region import log_ratio


class Correction(NamedTuple):
  """Per token: float32 weight, and bool where the cap took something away from it."""

  weight_t: jax.Array
  truncated_t: jax.Array


def token_truncated_importance(
  proximal_log_probs_t: jax.Array,
  behaviour_log_probs_t: jax.Array,
  mask_t: jax.Array,
  *,
  cap: float = 2.0,
) -> Correction:
  """Truncated importance weight of every token (token TIS).

  wₜ = min(exp(log π_proximal,ₜ − log π_behaviour,ₜ), C)

  Divided by: nothing; truncated tokens stay in the denominator of the loss that is weighted.
  Gradient flows through: nothing.
  See "IMPALA", Espeholt et al. (https://arxiv.org/abs/1802.01561), and "AReaL", Fu et al.
  (https://arxiv.org/abs/2505.24298), for the decoupled loss it belongs to.

  Args:
    proximal_log_probs_t: any float dtype, any shape.
    behaviour_log_probs_t: as recorded when the token was sampled, the same shape.
    mask_t: True where trained on.
    cap: C > 0.

  Returns: Correction(weight_t, truncated_t).
  """
  difference = log_ratio(proximal_log_probs_t, behaviour_log_probs_t, mask_t)
  weight = jnp.exp(jax.lax.stop_gradient(difference))
  return Correction(jnp.minimum(weight, cap), mask_t & (weight > cap))
