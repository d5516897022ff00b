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


def r2vpo(ratio: Ratio, inputs: LossInputs, *, state: jax.Array) -> TokenLoss:
  """A squared distance of the ratio from 1 whose price is set so that its mean keeps to a bound.

  Lₜ = −ρₜÂₜ + λ (ρₜ − 1)²;  after each update λ = max(λ + η (E[(ρ − 1)²] − δ), 0)

  E[ρ] is 1 under the base policy, so E[(ρ − 1)²] over the trained tokens of the batch is the ratio's
  variance: λ is the dual variable of max E[ρA] under Var[ρ] ≤ δ.
  Divided by: the aggregation's denominator. Gradient flows through: the ratio; λ is held.
  See "Ratio-Variance Regularized Policy Optimization", Luo et al.
  (https://arxiv.org/abs/2605.26784): the constraint and its primal-dual form. The values of δ, η and
  the first λ are ours.

  Args:
    ratio: its base is the policy that sampled, or several updates are made of a batch: else ρ is 1.
    inputs: [rows, N].
    state: λ, from `first_price`.
    delta: δ, a bound of the variance.
    step: η.
    start: λ of the first update.
  """
  rho = ratio.ratio_t
  square = (rho - 1.0) ** 2
  one = _unclipped(-rho * inputs.adv_t + state * square)
  return one._replace(
    metrics={'ratio_variance': square, 'ratio_price': jnp.broadcast_to(state, rho.shape)}
  )


def first_price(*, start: Annotated[float, Range(0.0)] = 1.0) -> jax.Array:
  """State of `r2vpo`: λ, float32."""
  return jnp.float32(start)


def raise_price(
  state: jax.Array,
  metrics: dict[str, jax.Array],
  *,
  delta: Annotated[float, Range(0.0)] = 0.02,
  step: Annotated[float, Range(0.0)] = 1.0,
) -> jax.Array:
  """One step of dual ascent on λ of `r2vpo`; it never falls below 0."""
  return jnp.maximum(state + step * (metrics['ratio_variance'] - delta), 0.0)


def _unclipped(loss_t: jax.Array) -> TokenLoss:
  nowhere = jnp.zeros(loss_t.shape, bool)
  return TokenLoss(loss_t, nowhere, nowhere)


TABLE = {
  'sapo': Box(sapo, formula='−A (4/τ) σ(τ(ρ−1)), τ={tau_positive:g} if A>0 else {tau_negative:g}'),
  'spo': Box(spo, formula='−ρA + |A|(ρ−1)²/(2·{delta:g})'),
  'r2vpo': Box(
    r2vpo,
    formula='−ρA + λ(ρ−1)², λ for E(ρ−1)² ≤ {delta:g}',
    init_state=first_price,
    update_state=raise_price,
  ),
}
