"""BAPO: clip bounds that are searched for each batch, so that good answers carry their share.

Not for fixed bounds (`clip.py`). Invariant: the bounds are two numbers for the whole batch.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Statistics, TokenLoss
from rlax_stack.objectives.ratios import Ratio

_Bound = Annotated[float, Range(0.0)]
_Step = Annotated[float, Range(1e-3)]


def bapo(ratio: Ratio, inputs: LossInputs, *, statistics: Statistics) -> TokenLoss:
  """Clipped surrogate between bounds that widen until positive advantages weigh enough.

  Lₜ = max(−ρₜÂₜ, −clip(ρₜ, l, h)Âₜ)
  l rises from its start by steps until P/Q ≥ ρ₀ or its end is reached, then h does the same
  P = Σ_{Â≥0} min(ρₜ, h)Âₜ,  Q = Σ_{Â<0} max(ρₜ, l)|Âₜ|, over all trained tokens of the batch

  A higher l takes the gradient from bad tokens that have become rare, and makes Q larger, not smaller.
  Divided by: the aggregation's denominator. Gradient flows through: the ratio where it is not
  clipped.
  See "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs", Xi et al.
  (https://arxiv.org/abs/2510.18927); the search is that of the authors' code
  (https://github.com/WooooDyy/BAPO), whose dual clip is left out.

  Args:
    ratio: its base is the policy that sampled.
    inputs: [rows, N].
    statistics: from `search_bounds`.
    target: ρ₀.
    absolute_low_start: first l.
    absolute_low_end: last l.
    absolute_low_step: what l rises by.
    absolute_high_start: first h.
    absolute_high_end: last h.
    absolute_high_step: what h rises by.
  """
  low, high = statistics.scalars['low'], statistics.scalars['high']
  rho, adv = ratio.ratio_t, inputs.adv_t
  free, bound = -adv * rho, -adv * jnp.clip(rho, low, high)
  return TokenLoss(
    loss_t=jnp.where(bound > free, bound, free),
    clipped_low_t=inputs.mask_t & (adv < 0) & (rho < low),
    clipped_high_t=inputs.mask_t & (adv > 0) & (rho > high),
    metrics={
      'bound_low': jnp.broadcast_to(low, rho.shape),
      'bound_high': jnp.broadcast_to(high, rho.shape),
    },
  )


def search_bounds(
  inputs: LossInputs,
  *,
  ratio: Ratio,
  target: Annotated[float, Range(0.0)] = 0.5,
  absolute_low_start: _Bound = 0.6,
  absolute_low_end: _Bound = 0.9,
  absolute_low_step: _Step = 0.05,
  absolute_high_start: _Bound = 1.2,
  absolute_high_end: _Bound = 3.0,
  absolute_high_step: _Step = 0.1,
) -> Statistics:
  """The bounds of `bapo` for a batch.

  Args:
    inputs: [M, rows, N], under the current weights.
    ratio: of the same tokens.
    target: see `bapo`, as all that follow.
    absolute_low_start: first l.
    absolute_low_end: last l.
    absolute_low_step: what l rises by.
    absolute_high_start: first h.
    absolute_high_end: last h.
    absolute_high_step: what h rises by.

  Returns: scalars 'low' and 'high'.
  """
  lows = _ladder(absolute_low_start, absolute_low_end, absolute_low_step)
  highs = _ladder(absolute_high_start, absolute_high_end, absolute_high_step)
  first = [(low, highs[0]) for low in lows]
  pairs = jnp.asarray(np.array(first + [(lows[-1], high) for high in highs[1:]]), jnp.float32)
  rho, adv = jax.lax.stop_gradient(ratio.ratio_t), inputs.adv_t

  def enough(pair):
    positive = jnp.where(adv >= 0, jnp.minimum(rho, pair[1]) * adv, 0.0)
    negative = jnp.where(adv < 0, jnp.maximum(rho, pair[0]) * -adv, 0.0)
    return jnp.sum(positive) >= target * jnp.sum(negative)

  # Masked tokens have advantage 0 and count nowhere.
  met = jax.lax.map(enough, pairs).at[-1].set(True)
  chosen = pairs[jnp.argmax(met)]
  return Statistics(scalars={'low': chosen[0], 'high': chosen[1]})


def _ladder(start: float, end: float, step: float) -> list[float]:
  """From start by steps to end, the end included."""
  steps = max(int(np.ceil((end - start) / step - 1e-6)), 0)
  return [min(start + i * step, end) for i in range(steps)] + [max(start, end)]


TABLE = {
  'bapo': Box(
    bapo,
    formula='max(−ρA, −clip(ρ, l, h)A), l {absolute_low_start:g} to {absolute_low_end:g}, '
    'h {absolute_high_start:g} to {absolute_high_end:g} for P/Q ≥ {target:g}',
    batch_statistics=search_bounds,
  )
}
