"""Policy ratio and trust region, token by token, from log-probs, in float32.

Not for aggregation or corrections. Invariant: masked tokens have ratio exactly 1, loss 0 and
gradient 0, even where their inputs are NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ClipOutput(NamedTuple):
  """Per token, the shape of the inputs: loss and ratio (float32).

  And where the bound is active (bool).
  """

  loss_t: jax.Array
  ratio_t: jax.Array
  clipped_low_t: jax.Array
  clipped_high_t: jax.Array


def log_ratio(log_probs_t: jax.Array, base_log_probs_t: jax.Array, mask_t: jax.Array) -> jax.Array:
  """log π − log π_base in float32, exactly 0 outside `mask_t`.

  The mask is applied before any `exp`: a masked infinity or NaN would leak through the gradient of
  an `exp` that is masked afterwards.
  """
  difference = log_probs_t.astype(jnp.float32) - base_log_probs_t.astype(jnp.float32)
  return jnp.where(mask_t, difference, 0.0)


def ppo_clip(
  log_probs_t: jax.Array,
  proximal_log_probs_t: jax.Array,
  adv_t: jax.Array,
  mask_t: jax.Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
) -> ClipOutput:
  """Clipped surrogate policy loss of every token.

  Lₜ = max(−ρₜÂₜ, −clip(ρₜ, 1−ε_lo, 1+ε_hi)Âₜ),  ρₜ = exp(log πₜ − log π_proximal,ₜ)

  Divided by: the sum of the token weights over the global batch (by the caller).
  Gradient flows through: log_probs_t only; the proximal log-probs and the advantages are held
  constant.
  See "Proximal Policy Optimization", Schulman et al. (https://arxiv.org/abs/1707.06347); separate
  bounds from "DAPO", Yu et al. (https://arxiv.org/abs/2503.14476).

  Args:
    log_probs_t: of the current policy, any float dtype, any shape.
    proximal_log_probs_t: of the policy that the ratio is measured against, the same shape.
    adv_t: advantages, the same shape.
    mask_t: True where trained on.
    clip_low: ε_lo in [0, 1].
    clip_high: ε_hi ≥ 0.

  Returns: ClipOutput. A token counts as clipped where the bound takes its gradient away.
  """
  proximal = jax.lax.stop_gradient(proximal_log_probs_t)
  adv = jnp.where(mask_t, jax.lax.stop_gradient(adv_t).astype(jnp.float32), 0.0)
  ratio = jnp.exp(log_ratio(log_probs_t, proximal, mask_t))
  free, bound = -adv * ratio, -adv * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  # At a tie `maximum` would send half of the gradient to each side; the free side takes it all
  # here.
  loss = jnp.where(bound > free, bound, free)
  return ClipOutput(
    loss_t=loss,
    ratio_t=ratio,
    clipped_low_t=mask_t & (adv < 0) & (ratio < 1.0 - clip_low),
    clipped_high_t=mask_t & (adv > 0) & (ratio > 1.0 + clip_high),
  )
