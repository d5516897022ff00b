"""Importance weights proximal / behaviour, truncated or masked.

Not a trust region: the weights carry no gradient. Invariant: masked tokens have weight exactly 1.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios, segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import Correction, LossInputs


def token_tis(
  inputs: LossInputs, *, absolute_high: Annotated[float, Range(0.0)] = 2.0
) -> Correction:
  """Truncated importance weight of every token.

  wₜ = min(π_proximal,ₜ / π_behaviour,ₜ, C)

  Divided by: nothing; the denominator of the loss stays. Gradient flows through: nothing.
  See "IMPALA", Espeholt et al. (https://arxiv.org/abs/1802.01561), and "AReaL", Fu et al.
  (https://arxiv.org/abs/2505.24298), for the decoupled loss it belongs to.

  Args:
    inputs: [rows, N].
    absolute_high: C.
  """
  weight = ratios.exp(log_weight(inputs))
  truncated = inputs.mask_t & (weight > absolute_high)
  return Correction(jnp.minimum(weight, absolute_high), jnp.ones_like(inputs.mask_t), truncated)


def sequence_tis(
  inputs: LossInputs, *, absolute_high: Annotated[float, Range(0.0)] = 2.0
) -> Correction:
  """Truncated importance weight of the whole sequence, at each of its tokens.

  wₜ = min(Π_s π_proximal,ₛ / π_behaviour,ₛ, C)

  Divided by: nothing; the denominator of the loss stays. Gradient flows through: nothing.
  See "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", Yao et al.
  (https://fengyao.notion.site/off-policy-rl).

  Args:
    inputs: [rows, N].
    absolute_high: C.
  """
  product = segments.run_sum(log_weight(inputs), inputs.mask_t, inputs.trajectory_t)
  weight = ratios.exp(product)
  truncated = inputs.mask_t & (weight > absolute_high)
  return Correction(jnp.minimum(weight, absolute_high), jnp.ones_like(inputs.mask_t), truncated)


def icepop(
  inputs: LossInputs,
  *,
  absolute_low: Annotated[float, Range(0.0, 1.0)] = 0.5,
  absolute_high: Annotated[float, Range(1.0)] = 5.0,
) -> Correction:
  """Importance weight of every token, and no token whose weight is outside the bounds.

  wₜ = kₜ π_proximal,ₜ / π_behaviour,ₜ,  kₜ = 1[a ≤ π_proximal,ₜ / π_behaviour,ₜ ≤ b]

  Divided by: nothing; dropped tokens stay in the denominator. Gradient flows through: nothing.
  See "Every Step Evolves", Ling team (https://arxiv.org/abs/2510.18855).

  Args:
    inputs: [rows, N].
    absolute_low: a.
    absolute_high: b.
  """
  weight = ratios.exp(log_weight(inputs))
  kept = (weight >= absolute_low) & (weight <= absolute_high)
  return Correction(jnp.where(kept, weight, 0.0), kept, inputs.mask_t & ~kept)


def log_weight(inputs: LossInputs) -> jax.Array:
  """log π_proximal − log π_behaviour of every token, held constant."""
  proximal = jax.lax.stop_gradient(inputs.proximal_log_probs_t)
  return ratios.log_ratio(proximal, inputs.behaviour_log_probs_t, inputs.mask_t)


_IMPORTANCE = frozenset({'importance'})

TABLE = {
  'token_tis': Box(token_tis, formula='min(w, {absolute_high:g})', tags=_IMPORTANCE),
  'sequence_tis': Box(sequence_tis, formula='min(Π w, {absolute_high:g})', tags=_IMPORTANCE),
  'icepop': Box(
    icepop,
    formula='w·1[{absolute_low:g} ≤ w ≤ {absolute_high:g}]',
    tags=frozenset({'importance', 'token_mask'}),
  ),
}
