"""Surrogates that are clipped, and the two that are not.

Not for soft gates or divergence masks. Invariant: a token counts as clipped exactly where the bound
takes its gradient away (CISPO: where it holds the weight), and on which side.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, TokenLoss
from rlax_stack.objectives.ratios import Ratio


def reinforce(ratio: Ratio, inputs: LossInputs) -> TokenLoss:
  """Plain policy gradient; reads no ratio, so off policy it is biased unless a correction weighs it.

  Lₜ = −Âₜ log πₜ

  Divided by: the aggregation's denominator. Gradient flows through: log_probs_t.
  See "Simple Statistical Gradient-Following Algorithms", Williams
  (https://doi.org/10.1007/BF00992696).

  Args:
    ratio: not read.
    inputs: [rows, N].
  """
  del ratio
  return _unbounded(-inputs.adv_t * inputs.log_probs_t)


def none(ratio: Ratio, inputs: LossInputs) -> TokenLoss:
  """Importance-weighted policy gradient without a bound; with ratio 1 that of REINFORCE.

  Lₜ = −ρₜÂₜ

  Divided by: the aggregation's denominator. Gradient flows through: the ratio.
  See "Back to Basics", Ahmadian et al. (https://arxiv.org/abs/2402.14740), which finds clipping
  unnecessary near the sampling policy.

  Args:
    ratio: see Ratio.
    inputs: [rows, N].
  """
  return _unbounded(-inputs.adv_t * ratio.ratio_t)


def ppo_clip(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  delta_low: Annotated[float, Range(0.0, 1.0)] = 0.2,
  delta_high: Annotated[float, Range(0.0)] = 0.28,
) -> TokenLoss:
  """Clipped surrogate.

  Lₜ = max(−ρₜÂₜ, −clip(ρₜ, 1−δ_lo, 1+δ_hi)Âₜ)

  Divided by: the aggregation's denominator. Gradient flows through: the ratio where it is not
  clipped.
  See "Proximal Policy Optimization", Schulman et al. (https://arxiv.org/abs/1707.06347); separate
  bounds from "DAPO", Yu et al. (https://arxiv.org/abs/2503.14476).

  Args:
    ratio: see Ratio.
    inputs: [rows, N].
    delta_low: δ_lo, a distance from 1.
    delta_high: δ_hi, a distance from 1.
  """
  rho, adv = ratio.ratio_t, inputs.adv_t
  free, bound = -adv * rho, -adv * jnp.clip(rho, 1.0 - delta_low, 1.0 + delta_high)
  return TokenLoss(
    # At a tie `maximum` would send half of the gradient to each side; the free side takes it all.
    loss_t=jnp.where(bound > free, bound, free),
    clipped_low_t=inputs.mask_t & (adv < 0) & (rho < 1.0 - delta_low),
    clipped_high_t=inputs.mask_t & (adv > 0) & (rho > 1.0 + delta_high),
  )


def dual_clip(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  delta_low: Annotated[float, Range(0.0, 1.0)] = 0.2,
  delta_high: Annotated[float, Range(0.0)] = 0.28,
  absolute_high: Annotated[float, Range(1.0)] = 3.0,
) -> TokenLoss:
  """Clipped surrogate whose loss is bounded for negative advantages too.

  Lₜ = min(max(−ρₜÂₜ, −clip(ρₜ, 1−δ_lo, 1+δ_hi)Âₜ), −cÂₜ) where Âₜ < 0, else `ppo_clip`

  Divided by: the aggregation's denominator. Gradient flows through: the ratio where no bound holds.
  See "Mastering Complex Control in MOBA Games", Ye et al. (https://arxiv.org/abs/1912.09729).

  Args:
    ratio: see Ratio.
    inputs: [rows, N].
    delta_low: δ_lo, a distance from 1.
    delta_high: δ_hi, a distance from 1.
    absolute_high: c, the largest ratio that a negative advantage is weighed with.
  """
  clipped = ppo_clip(ratio, inputs, delta_low=delta_low, delta_high=delta_high)
  capped = inputs.mask_t & (inputs.adv_t < 0) & (ratio.ratio_t > absolute_high)
  return clipped._replace(
    loss_t=jnp.where(capped, -absolute_high * inputs.adv_t, clipped.loss_t),
    clipped_high_t=clipped.clipped_high_t | capped,
  )


def cispo(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  delta_low: Annotated[float, Range(0.0, 1.0)] = 1.0,
  delta_high: Annotated[float, Range(0.0)] = 0.28,
) -> TokenLoss:
  """Policy gradient with a clipped importance weight: no token loses its gradient.

  Lₜ = −sg[clip(ρₜ, 1−δ_lo, 1+δ_hi)] Âₜ log πₜ

  Divided by: the aggregation's denominator. Gradient flows through: log_probs_t, never the ratio.
  See "MiniMax-M1" (https://arxiv.org/abs/2506.13585), which sets no lower bound (δ_lo = 1).

  Args:
    ratio: see Ratio.
    inputs: [rows, N].
    delta_low: δ_lo, a distance from 1; 1 is no bound.
    delta_high: δ_hi, a distance from 1.
  """
  rho = jax.lax.stop_gradient(ratio.ratio_t)
  weight = jnp.clip(rho, 1.0 - delta_low, 1.0 + delta_high)
  return TokenLoss(
    loss_t=-weight * inputs.adv_t * inputs.log_probs_t,
    clipped_low_t=inputs.mask_t & (rho < 1.0 - delta_low),
    clipped_high_t=inputs.mask_t & (rho > 1.0 + delta_high),
  )


def log_clip(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  delta_log_low: Annotated[float, Range(0.0)] = 0.4,
  delta_log_high: Annotated[float, Range(0.0)] = 0.4,
) -> TokenLoss:
  """Clips the log-ratio of every token, then pools; with ratio `geometric_mean` this is GMPO.

  d̃ₜ = sgn(Â) min(sgn(Â) dₜ, sgn(Â) clip(dₜ, −δ_lo, δ_hi)),  dₜ = log πₜ/π_base,ₜ
  Lₜ = −Âₜ exp(pool(d̃)ₜ)

  Divided by: the aggregation's denominator (sequence_mean makes it the mean over sequences).
  Gradient flows through: dₜ where it is not clipped.
  See "Geometric-Mean Policy Optimization", Zhao et al. (https://arxiv.org/abs/2507.20673).

  Args:
    ratio: see Ratio; its `pool` joins the clipped log-ratios.
    inputs: [rows, N].
    delta_log_low: δ_lo, a distance from 0 in log space.
    delta_log_high: δ_hi, a distance from 0 in log space.
  """
  log_token, adv = ratio.log_token_t, inputs.adv_t
  low = inputs.mask_t & (adv < 0) & (log_token < -delta_log_low)
  high = inputs.mask_t & (adv > 0) & (log_token > delta_log_high)
  bounded = jnp.where(low, -delta_log_low, jnp.where(high, delta_log_high, log_token))
  return TokenLoss(-adv * ratios.exp(ratio.pool(bounded)), low, high)


def _unbounded(loss_t: jax.Array) -> TokenLoss:
  nowhere = jnp.zeros(loss_t.shape, bool)
  return TokenLoss(loss_t, nowhere, nowhere)


_BOUNDS = '1−{delta_low:g}, 1+{delta_high:g}'

TABLE = {
  'reinforce': Box(reinforce, formula='−A log π', tags=frozenset({'no_ratio'})),
  'none': Box(none, formula='−ρA'),
  'ppo_clip': Box(ppo_clip, formula=f'max(−ρA, −clip(ρ, {_BOUNDS})A)'),
  'dual_clip': Box(
    dual_clip, formula=f'max(−ρA, −clip(ρ, {_BOUNDS})A), at most −{{absolute_high:g}}A if A<0'
  ),
  'cispo': Box(cispo, formula=f'−sg[clip(ρ, {_BOUNDS})] A log π'),
  'log_clip': Box(
    log_clip, formula='−A ρ, each log ρₜ clipped to [−{delta_log_low:g}, {delta_log_high:g}]'
  ),
}
