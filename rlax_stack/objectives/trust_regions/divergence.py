"""Masks by the change of a token's probability, where clips look at its ratio (DPPO).

Not for whole distributions: the token against all others is a distribution of two, so the log-probs
of the sampled tokens are enough. Invariant: only a token that moves further away is masked.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, TokenLoss
from rlax_stack.objectives.ratios import Ratio

# Keeps the logarithm of a probability's complement finite, as in the authors' code.
_FLOOR = 1e-8


def dppo_tv(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  delta_low: Annotated[float, Range(0.0, 1.0)] = 0.15,
  delta_high: Annotated[float, Range(0.0, 1.0)] = 0.15,
  absolute_high: Annotated[float, Range(1.0)] = 20.0,
) -> TokenLoss:
  """Drops tokens whose probability has moved too far in the direction of their advantage.

  Lₜ = −sg[kₜ min(1, C/ρₜ)] ρₜÂₜ,  kₜ = 0 where Âₜ > 0 and πₜ − π_base,ₜ > δ_hi, or where Âₜ < 0 and
  π_base,ₜ − πₜ > δ_lo, else 1

  Divided by: the aggregation's denominator; dropped tokens stay in it. Gradient flows through: the
  ratio, with weight at most C.
  See "Rethinking the Trust Region in LLM Reinforcement Learning", Qi et al.
  (https://arxiv.org/abs/2602.04879), binary TV; thresholds of its examples in verl.

  Args:
    ratio: its base is the policy that sampled.
    inputs: [rows, N].
    delta_low: δ_lo, a distance between probabilities.
    delta_high: δ_hi, a distance between probabilities.
    absolute_high: C, the largest weight of a token that is kept.
  """
  prob, base = _probabilities(ratio, inputs)
  low = (inputs.adv_t < 0) & (base - prob > delta_low)
  high = (inputs.adv_t > 0) & (prob - base > delta_high)
  return _masked(ratio, inputs, low, high, absolute_high)


def dppo_kl(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  delta_low: Annotated[float, Range(0.0)] = 0.05,
  delta_high: Annotated[float, Range(0.0)] = 0.05,
  absolute_high: Annotated[float, Range(1.0)] = 20.0,
) -> TokenLoss:
  """`dppo_tv` with the KL between the two-way distributions in place of the distance.

  kₜ = 0 where Dₜ > δ and πₜ has moved in the direction of Âₜ, else 1
  Dₜ = b log(b/p) + (1−b) log((1−b)/(1−p)),  p = πₜ, b = π_base,ₜ

  Divided by: the aggregation's denominator; dropped tokens stay in it. Gradient flows through: the
  ratio, with weight at most C.
  See "Rethinking the Trust Region in LLM Reinforcement Learning", Qi et al.
  (https://arxiv.org/abs/2602.04879), binary KL; thresholds of its examples in TRL.

  Args:
    ratio: its base is the policy that sampled.
    inputs: [rows, N].
    delta_low: δ of negative advantages, a divergence in nats.
    delta_high: δ of positive advantages, a divergence in nats.
    absolute_high: C, the largest weight of a token that is kept.
  """
  prob, base = _probabilities(ratio, inputs)
  other = jnp.log((1.0 - base + _FLOOR) / (1.0 - prob + _FLOOR))
  divergence = -base * jax.lax.stop_gradient(ratio.log_token_t) + (1.0 - base) * other
  low = (inputs.adv_t < 0) & (prob < base) & (divergence > delta_low)
  high = (inputs.adv_t > 0) & (prob > base) & (divergence > delta_high)
  masked = _masked(ratio, inputs, low, high, absolute_high)
  return masked._replace(metrics={'binary_kl': divergence})


def _probabilities(ratio: Ratio, inputs: LossInputs) -> tuple[jax.Array, jax.Array]:
  """Probability of each token now and under the ratio's base, held constant."""
  log_probs = jax.lax.stop_gradient(inputs.log_probs_t)
  base = log_probs - jax.lax.stop_gradient(ratio.log_token_t)
  return jnp.exp(jnp.minimum(log_probs, 0.0)), jnp.exp(jnp.minimum(base, 0.0))


def _masked(
  ratio: Ratio, inputs: LossInputs, low: jax.Array, high: jax.Array, absolute_high: float
) -> TokenLoss:
  rho = ratio.ratio_t
  scale = jax.lax.stop_gradient(jnp.minimum(1.0, absolute_high / rho))
  loss = jnp.where(low | high, 0.0, -scale * rho * inputs.adv_t)
  return TokenLoss(loss, inputs.mask_t & low, inputs.mask_t & high)


_MASK = frozenset({'token_mask'})

TABLE = {
  'dppo_tv': Box(
    dppo_tv,
    formula='−sg[1[|π−π_base| ≤ {delta_low:g}, {delta_high:g}]] ρA, ρ ≤ {absolute_high:g}',
    tags=_MASK,
  ),
  'dppo_kl': Box(
    dppo_kl,
    formula='−sg[1[KL₂(π_base‖π) ≤ {delta_low:g}, {delta_high:g}]] ρA, ρ ≤ {absolute_high:g}',
    tags=_MASK,
  ),
}
