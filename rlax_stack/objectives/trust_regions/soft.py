"""Surrogates that pull towards ratio 1 smoothly: no token loses its gradient at a hard bound.

Not for clips (`clip.py`) or masks (`divergence.py`). Invariant: at ratio 1 the gradient is that of
−ρA.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, TokenLoss
from rlax_stack.objectives.ratios import Ratio


def sapo(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  tau_positive: Annotated[float, Range(1e-3)] = 1.0,
  tau_negative: Annotated[float, Range(1e-3)] = 1.05,
) -> TokenLoss:
  """A sigmoid gate in place of the clip: the gradient fades as the ratio leaves 1.

  Lₜ = −Âₜ (4/τ) σ(τ(ρₜ − 1)),  τ = τ⁺ where Âₜ > 0, else τ⁻

  Divided by: the aggregation's denominator (the paper's mean over sequences is sequence_mean).
  Gradient flows through: the ratio, with weight 4σ(1 − σ), which is 1 at ρ = 1.
  See "Soft Adaptive Policy Optimization", Gao et al. (https://arxiv.org/abs/2511.20347).

  Args:
    ratio: see Ratio.
    inputs: [rows, N].
    tau_positive: τ⁺; larger fades faster.
    tau_negative: τ⁻, larger than τ⁺ since what a negative advantage takes from one token goes to
      many others.
  """
  tau = jnp.where(inputs.adv_t > 0, tau_positive, tau_negative)
  gate = jax.nn.sigmoid(tau * (ratio.ratio_t - 1.0)) * (4.0 / tau)
  return _unclipped(-inputs.adv_t * gate)


def spo(
  ratio: Ratio, inputs: LossInputs, *, delta: Annotated[float, Range(1e-6)] = 0.2
) -> TokenLoss:
  """A parabola in place of the clip: the best ratio is 1 ± δ, and beyond it the gradient turns.

  Lₜ = −ρₜÂₜ + |Âₜ| (ρₜ − 1)² / (2δ)

  Divided by: the aggregation's denominator. Gradient flows through: the ratio; it is 0 at
  ρ = 1 + δ sgn(Â).
  See "Simple Policy Optimization", Xie et al. (https://arxiv.org/abs/2401.16025).

  Args:
    ratio: see Ratio.
    inputs: [rows, N].
    delta: δ, the distance from 1 at which the loss is least.
  """
  rho, adv = ratio.ratio_t, inputs.adv_t
  return _unclipped(-rho * adv + jnp.abs(adv) * (rho - 1.0) ** 2 / (2.0 * delta))


def _unclipped(loss_t: jax.Array) -> TokenLoss:
  nowhere = jnp.zeros(loss_t.shape, bool)
  return TokenLoss(loss_t, nowhere, nowhere)


TABLE = {
  'sapo': Box(sapo, formula='−A (4/τ) σ(τ(ρ−1)), τ={tau_positive:g} if A>0 else {tau_negative:g}'),
  'spo': Box(spo, formula='−ρA + |A|(ρ−1)²/(2·{delta:g})'),
}
