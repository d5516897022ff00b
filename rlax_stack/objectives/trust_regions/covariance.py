"""Clip-Cov and KL-Cov: the few tokens that would cost the most entropy are held back.

Not for bounds of the ratio alone. Invariant: which tokens those are is decided over the whole batch,
so it does not depend on micro-batches, packing or devices.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from rlax_stack.objectives import segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Statistics, TokenLoss
from rlax_stack.objectives.ratios import Ratio
from rlax_stack.objectives.trust_regions.clip import ppo_clip

_Fraction = Annotated[float, Range(0.0, 1.0)]


def clip_cov(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  statistics: Statistics,
  delta_low: Annotated[float, Range(0.0, 1.0)] = 0.2,
  delta_high: Annotated[float, Range(0.0)] = 0.2,
) -> TokenLoss:
  """`ppo_clip` without a random few of the tokens whose covariance lies between two bounds.

  Lₜ = 0 where t is chosen, else max(−ρₜÂₜ, −clip(ρₜ, 1−δ_lo, 1+δ_hi)Âₜ)
  chosen: max(⌊fN⌋, 1) tokens at random of those with a < Cₜ < b that the clip leaves their gradient
  Cₜ = (Âₜ − mean Â)(log πₜ − mean log π), both means over all N trained tokens of the batch

  Divided by: the aggregation's denominator; chosen tokens stay in it. Gradient flows through: the
  ratio where it is neither chosen nor clipped.
  See "The Entropy Mechanism of Reinforcement Learning", Cui et al.
  (https://arxiv.org/abs/2505.22617); values of its code in verl.

  Args:
    ratio: see Ratio.
    inputs: [rows, N].
    statistics: from `choose_inside`.
    delta_low: δ_lo, a distance of the ratio from 1.
    delta_high: δ_hi, a distance of the ratio from 1.
    fraction: f.
    absolute_low: a, a covariance.
    absolute_high: b, a covariance.
  """
  chosen = statistics.tokens['chosen']
  clipped = ppo_clip(ratio, inputs, delta_low=delta_low, delta_high=delta_high)
  return clipped._replace(
    loss_t=jnp.where(chosen, 0.0, clipped.loss_t), metrics={'covariance_chosen': chosen}
  )


def kl_cov(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  statistics: Statistics,
  coef: Annotated[float, Range(0.0)] = 1.0,
) -> TokenLoss:
  """No clip; the tokens of the largest covariance are pulled back to the base policy.

  Lₜ = −ρₜÂₜ + β·1[t is chosen]·|log πₜ / π_base,ₜ|
  chosen: the max(⌊fN⌋, 1) tokens of the largest Cₜ, see `clip_cov`

  Divided by: the aggregation's denominator. Gradient flows through: the ratio and its logarithm.
  See "The Entropy Mechanism of Reinforcement Learning", Cui et al.
  (https://arxiv.org/abs/2505.22617); values of its code in verl.

  Args:
    ratio: see Ratio.
    inputs: [rows, N].
    statistics: from `choose_largest`.
    coef: β.
    fraction: f.
  """
  chosen = statistics.tokens['chosen']
  # Not `abs`, whose gradient at 0 is 1: on policy nothing pulls.
  sign = jax.lax.stop_gradient(jnp.sign(ratio.log_token_t))
  pull = jnp.where(chosen, coef * sign * ratio.log_token_t, 0.0)
  nowhere = jnp.zeros_like(chosen)
  loss = -ratio.ratio_t * inputs.adv_t + pull
  return TokenLoss(loss, nowhere, nowhere, {'covariance_chosen': chosen})


def choose_inside(
  inputs: LossInputs,
  *,
  ratio: Ratio,
  state: jax.Array,
  fraction: _Fraction = 0.0002,
  absolute_low: float = 1.0,
  absolute_high: float = 5.0,
  delta_low: Annotated[float, Range(0.0, 1.0)] = 0.2,
  delta_high: Annotated[float, Range(0.0)] = 0.2,
) -> Statistics:
  """The tokens that `clip_cov` holds back.

  The choice is drawn from the number of updates and each token's place in its trajectory, so that
  the same batch gives the same choice however it is laid out.

  Args:
    inputs: [M, rows, N], under the current weights.
    ratio: of the same tokens.
    state: updates so far.
    fraction: see `clip_cov`, as all that follow.
    absolute_low: a.
    absolute_high: b.
    delta_low: δ_lo.
    delta_high: δ_hi.

  Returns: tokens 'chosen', bool.
  """
  clipped = ppo_clip(ratio, inputs, delta_low=delta_low, delta_high=delta_high)
  covariance = _covariance(inputs)
  inside = (covariance > absolute_low) & (covariance < absolute_high)
  able = inputs.mask_t & inside & ~clipped.clipped_low_t & ~clipped.clipped_high_t
  # Larger draws first; what may not be chosen comes last.
  draw = jnp.where(able, _draw(inputs, state), -1.0)
  return Statistics(tokens={'chosen': able & (draw >= _nth_largest(draw, inputs.mask_t, fraction))})


def choose_largest(inputs: LossInputs, *, fraction: _Fraction = 0.0002) -> Statistics:
  """The tokens that `kl_cov` pulls back; equal covariances at the edge are all chosen.

  Args:
    inputs: [M, rows, N], under the current weights.
    fraction: see `kl_cov`.

  Returns: tokens 'chosen', bool.
  """
  covariance = jnp.where(inputs.mask_t, _covariance(inputs), -jnp.inf)
  edge = _nth_largest(covariance, inputs.mask_t, fraction)
  return Statistics(tokens={'chosen': inputs.mask_t & (covariance >= edge)})


def init_updates() -> jax.Array:
  """Updates so far, float32."""
  return jnp.float32(0.0)


def count_update(state: jax.Array, metrics: dict[str, jax.Array]) -> jax.Array:
  """One update more."""
  del metrics
  return state + 1.0


def _covariance(inputs: LossInputs) -> jax.Array:
  mask = inputs.mask_t
  count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)

  def centred(value):
    return value - jnp.sum(jnp.where(mask, value, 0.0)) / count

  return centred(inputs.adv_t) * centred(inputs.log_probs_t)


def _nth_largest(value: jax.Array, mask: jax.Array, fraction: float) -> jax.Array:
  """The value of rank max(⌊fraction · trained tokens⌋, 1), counted from the largest."""
  trained = jnp.sum(mask.astype(jnp.float32))
  rank = jnp.maximum(jnp.floor(fraction * trained), 1.0).astype(jnp.int32)
  return jnp.sort(value.reshape(-1))[value.size - rank]


def _draw(inputs: LossInputs, state: jax.Array) -> jax.Array:
  """Uniform numbers of the tokens, by update, trajectory and place in it."""
  mask = inputs.mask_t
  place = jnp.cumsum(mask.astype(jnp.int32), axis=-1)
  start = jnp.where(segments.run_start(mask, inputs.trajectory_t), place, 0)
  place = place - jax.lax.cummax(start, axis=mask.ndim - 1)
  key = jax.random.fold_in(jax.random.key(0), state.astype(jnp.int32))

  def one(trajectory, place):
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, trajectory), place))

  ids = jnp.where(mask, inputs.trajectory_t, 0)
  return jax.vmap(one)(ids.reshape(-1), place.reshape(-1)).reshape(mask.shape)


TABLE = {
  'clip_cov': Box(
    clip_cov,
    formula='max(−ρA, −clip(ρ, 1−{delta_low:g}, 1+{delta_high:g})A), 0 for {fraction:g}·N tokens of '
    'covariance {absolute_low:g} to {absolute_high:g}',
    batch_statistics=choose_inside,
    init_state=init_updates,
    update_state=count_update,
  ),
  'kl_cov': Box(
    kl_cov,
    formula='−ρA + {coef:g}|log ρ| for the {fraction:g}·N tokens of the largest covariance',
    batch_statistics=choose_largest,
  ),
}
