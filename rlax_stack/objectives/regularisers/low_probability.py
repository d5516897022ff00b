"""Lp-Reg: unlikely words that are no noise are kept from being trained away.

Not for entropy terms. Invariant: only tokens of failures, among the least likely of the batch, are
pulled, and only upwards.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Penalty, Statistics

_Fraction = Annotated[float, Range(0.0, 1.0)]


def lp_reg(
  inputs: LossInputs,
  *,
  statistics: Statistics,
  vocabulary: dict[str, jax.Array],
  coef: Annotated[float, Range(0.0)] = 1.0,
) -> Penalty:
  """Pulls rare words of failures to a proxy, the policy without what it takes for noise.

  Lₜ = β (e^dₜ − dₜ − 1) where t is chosen, Âₜ < 0 and dₜ > 0, else 0;  dₜ = log π̂ₜ − log πₜ
  π̂(v) = π_proximal(v) / Σ_{u kept} π_proximal(u) where v is kept, else 0
  kept: π_proximal(v) ≥ κ maxᵤ π_proximal(u) ('relative') or ≥ κ ('absolute')
  chosen: the max(⌊fn⌋, 1) least likely of the n tokens of the batch with Âₜ < 0

  Divided by: the trained tokens of the batch. Gradient flows through: log_probs_t.
  See "Low-probability Tokens Sustain Exploration in RLVR", Huang et al.
  (https://arxiv.org/abs/2510.03222), in the form and with the values of its code
  (https://github.com/CarlanLark/Lp-Reg-dev), where a chosen token also has no clip (its bounds
  leave negative advantages unclipped anyway).

  Args:
    inputs: [rows, N].
    statistics: from `least_likely`.
    vocabulary: from `filtered_proxy`.
    coef: β.
    fraction: f.
    min_p: κ, the least probability that is no noise.
    relative: whether κ is a part of the largest probability of the distribution.
  """
  chosen, kept = statistics.tokens['chosen'], vocabulary['kept'] > 0.0
  gap = jnp.where(kept, vocabulary['log_proxy'] - inputs.log_probs_t, 0.0)
  pulled = inputs.mask_t & chosen & kept & (jax.lax.stop_gradient(gap) > 0.0)
  gap = jnp.clip(jnp.where(pulled, gap, 0.0), 0.0, ratios.MAX_LOG_RATIO)
  return Penalty(coef * (jnp.expm1(gap) - gap), metrics={'lp_reg_pulled': pulled})


def filtered_proxy(
  log_policy: jax.Array,
  target: jax.Array,
  *,
  min_p: _Fraction = 0.02,
  relative: bool = True,
) -> dict[str, jax.Array]:
  """The proxy's log-prob of each target and whether it is kept; see `lp_reg`.

  Args:
    log_policy: [n, V], of the proximal policy.
    target: [n].
    min_p: κ.
    relative: whether κ is a part of the largest probability.

  Returns: 'log_proxy' [n], 0 where the target is not kept, and 'kept' [n], 1 or 0.
  """
  least = jnp.log(jnp.float32(max(min_p, 1e-30)))
  if relative:
    least = least + jnp.max(log_policy, axis=-1, keepdims=True)
  inside = log_policy >= least
  total = jax.nn.logsumexp(log_policy, axis=-1, where=inside)
  chosen = jnp.take_along_axis(log_policy, target[:, None], axis=-1)[:, 0]
  kept = jnp.take_along_axis(inside, target[:, None], axis=-1)[:, 0]
  return {'log_proxy': jnp.where(kept, chosen - total, 0.0), 'kept': kept.astype(jnp.float32)}


def least_likely(inputs: LossInputs, *, fraction: _Fraction = 0.01) -> Statistics:
  """The tokens that `lp_reg` may pull: the least likely ones with a negative advantage.

  Args:
    inputs: [M, rows, N], under the current weights.
    fraction: f.

  Returns: tokens 'chosen', bool; those as likely as the last one chosen are chosen too.
  """
  negative = inputs.mask_t & (inputs.adv_t < 0.0)
  ordered = jnp.sort(jnp.where(negative, inputs.log_probs_t, jnp.inf).reshape(-1))
  count = jnp.sum(negative.astype(jnp.float32))
  rank = jnp.maximum(jnp.floor(fraction * count), 1.0).astype(jnp.int32)
  return Statistics(tokens={'chosen': negative & (inputs.log_probs_t <= ordered[rank - 1])})


TABLE = {
  'lp_reg': Box(
    lp_reg,
    formula='+ {coef:g}·(π̂/π − log π̂/π − 1) for the {fraction:g} least likely tokens with A<0, '
    'π̂ = π_proximal ≥ {min_p:g}',
    batch_statistics=least_likely,
    proximal_vocabulary=filtered_proxy,
  )
}
