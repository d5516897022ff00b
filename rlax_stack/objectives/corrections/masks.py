"""Masks: tokens and sequences that lie too far from the behaviour policy leave the loss.

They weigh nothing: name a weight such as `token_tis` beside them. Invariant: what a mask drops stays
in every denominator, and nothing is dropped where current, proximal and behaviour agree.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios, segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.corrections.importance import log_weight
from rlax_stack.objectives.inputs import Correction, LossInputs, Statistics

Over = Literal['trajectory', 'turn']
Low = Annotated[float, Range(0.0, 1.0)]
High = Annotated[float, Range(1.0)]


def geometric_mask(
  inputs: LossInputs,
  *,
  absolute_low: Low = 0.999,
  absolute_high: High = 1.001,
  over: Over = 'trajectory',
) -> Correction:
  """Keeps sequences whose geometric mean of importance weights is within the bounds.

  kᵢ = 1[a ≤ (Π wₜ)^(1/nᵢ) ≤ b],  wₜ = π_proximal,ₜ / π_behaviour,ₜ

  Divided by: nᵢ inside the mean, so length does not matter; dropped tokens stay in the denominator
  of the loss. Gradient flows through: nothing.
  See "When Speed Kills Stability", Liu et al., part 3 (https://richardli.xyz/rl-collapse-3). The
  narrow defaults are those of verl, for the mismatch of two engines; staleness needs wider ones.

  Args:
    inputs: [rows, N].
    absolute_low: a.
    absolute_high: b.
    over: 'trajectory', or 'turn' to decide by uninterrupted answer.
  """
  mean = segments.run_mean(log_weight(inputs), inputs.mask_t, *_ids(inputs, over))
  return _within(ratios.exp(mean), absolute_low, absolute_high, inputs)


def product_mask(
  inputs: LossInputs,
  *,
  absolute_low: Low = 0.5,
  absolute_high: High = 2.0,
  over: Over = 'trajectory',
) -> Correction:
  """Keeps sequences whose importance weight is within the bounds.

  kᵢ = 1[a ≤ Π wₜ ≤ b],  wₜ = π_proximal,ₜ / π_behaviour,ₜ

  Divided by: nothing, so longer sequences are dropped sooner; dropped tokens stay in the
  denominator. Gradient flows through: nothing.
  See "When Speed Kills Stability", Liu et al. (https://richardli.xyz/rl-collapse): with
  `sequence_tis` beside it this is sequence-level masked importance sampling.

  Args:
    inputs: [rows, N].
    absolute_low: a.
    absolute_high: b.
    over: see `geometric_mask`.
  """
  product = segments.run_sum(log_weight(inputs), inputs.mask_t, *_ids(inputs, over))
  return _within(ratios.exp(product), absolute_low, absolute_high, inputs)


def outlier_mask(
  inputs: LossInputs,
  *,
  absolute_low: Low = 1e-4,
  absolute_high: High = 100.0,
  over: Over = 'trajectory',
) -> Correction:
  """Keeps sequences of which every token's importance weight is within the bounds.

  kᵢ = Π 1[a ≤ wₜ ≤ b],  wₜ = π_proximal,ₜ / π_behaviour,ₜ

  Divided by: nothing; dropped tokens stay in the denominator. Gradient flows through: nothing.
  See the outlier mask of SkyRL (https://github.com/NovaSky-AI/SkyRL).

  Args:
    inputs: [rows, N].
    absolute_low: a.
    absolute_high: b.
    over: see `geometric_mask`.
  """
  weight = ratios.exp(log_weight(inputs))
  outside = (weight < absolute_low) | (weight > absolute_high)
  count = segments.run_sum(outside.astype(jnp.float32), inputs.mask_t, *_ids(inputs, over))
  return _mask(count == 0.0, inputs)


def opsm(inputs: LossInputs, *, delta_log_high: Annotated[float, Range(0.0)] = 0.5) -> Correction:
  """Off-policy sequence masking: drops failures that the current policy has moved away from.

  kᵢ = 0 where Âᵢ < 0 and (1/nᵢ) Σ log(π_behaviour,ₜ / πₜ) > δ, else 1;  Âᵢ the mean over the sequence

  Divided by: nᵢ inside the mean; dropped tokens stay in the denominator. Gradient flows through:
  nothing (π is held).
  See "DeepSeek-V3.2" (https://arxiv.org/abs/2512.02556), equation 9, whose π_old is the policy as
  sampled. The paper gives no value of δ.

  Args:
    inputs: [rows, N].
    delta_log_high: δ, a distance from 0 in log space.
  """
  mean = segments.run_mean(-_log_drift(inputs), inputs.mask_t, inputs.trajectory_t)
  adv = segments.run_mean(inputs.adv_t, inputs.mask_t, inputs.trajectory_t)
  return _mask((adv >= 0.0) | (mean <= delta_log_high), inputs)


def tv_mask(inputs: LossInputs, *, delta: Annotated[float, Range(0.0)] = 0.2) -> Correction:
  """Of sequences far from behaviour, drops the tokens that an update would move further away.

  kₜ = 0 where (1/nᵢ) Σ |wₛ − 1| > δ and sgn(log wₜ) Âₜ > 0, else 1;  w = π_proximal / π_behaviour

  Divided by: nᵢ inside the mean, which estimates twice the total variation; dropped tokens stay in
  the denominator. Gradient flows through: nothing.
  See "Align and Filter", Honari et al. (https://arxiv.org/abs/2603.01365), in the form by sequence
  of open-instruct (https://github.com/allenai/open-instruct). The default δ is ours.

  Args:
    inputs: [rows, N].
    delta: δ, a distance from 1.
  """
  log_w = log_weight(inputs)
  distance = jnp.abs(ratios.exp(log_w) - 1.0)
  mean = segments.run_mean(distance, inputs.mask_t, inputs.trajectory_t)
  return _mask((mean <= delta) | (jnp.sign(log_w) * inputs.adv_t <= 0.0), inputs)


def second_moment_statistics(
  inputs: LossInputs,
  *,
  absolute_high: Annotated[float, Range(0.0)] = 0.04,
  tokens: Literal['outward', 'all'] = 'outward',
) -> Statistics:
  """Which tokens of the whole batch M2PO keeps; see `second_moment_mask`."""
  drift = _log_drift(inputs)
  counted = inputs.mask_t
  if tokens == 'outward':
    counted = counted & (drift * inputs.adv_t > 0.0)
  moment = drift * drift
  ordered = jnp.sort(jnp.where(counted, moment, jnp.inf).reshape(-1))
  rank = jnp.arange(1, ordered.size + 1, dtype=jnp.float32)
  mean = jnp.cumsum(jnp.where(jnp.isfinite(ordered), ordered, 0.0)) / rank
  below = jnp.isfinite(ordered) & (mean <= absolute_high)
  # The means only rise, so what is below is a prefix; ties with the first one out go out with it.
  first_out = jnp.min(jnp.where(below, jnp.inf, ordered))
  return Statistics(tokens={'kept': ~counted | (moment < first_out)})


def second_moment_mask(
  inputs: LossInputs,
  *,
  statistics: Statistics,
  absolute_high: Annotated[float, Range(0.0)] = 0.04,
  tokens: Literal['outward', 'all'] = 'outward',
) -> Correction:
  """Drops the tokens with the largest log-ratios until their second moment over the batch is small.

  kₜ = 0 for the largest (log uₜ)² until the mean of those left ≤ τ,  u = π / π_behaviour

  Divided by: the counted tokens of the whole batch inside the mean, on any number of devices;
  dropped tokens stay in the denominator of the loss. Gradient flows through: nothing (π is held).
  See "Prosperity before Collapse", Zheng et al. (https://arxiv.org/abs/2510.01161), with τ = 0.04
  in all its experiments.

  Args:
    inputs: [rows, N].
    statistics: from `second_moment_statistics`.
    absolute_high: τ, the largest second moment of the log-ratio.
    tokens: 'outward' counts and drops only tokens with Âₜ log uₜ > 0, those that PPO could clip, as
      the authors' code does; 'all' every token, as AReaL does.
  """
  del absolute_high, tokens
  return _mask(statistics.tokens['kept'], inputs)


def _log_drift(inputs: LossInputs) -> jax.Array:
  """log π − log π_behaviour of every token, held constant."""
  current = jax.lax.stop_gradient(inputs.log_probs_t)
  return ratios.log_ratio(current, inputs.behaviour_log_probs_t, inputs.mask_t)


def _ids(inputs: LossInputs, over: Over) -> tuple[jax.Array, ...]:
  if over == 'turn':
    return inputs.trajectory_t, inputs.turn_t
  return (inputs.trajectory_t,)


def _within(value: jax.Array, low: float, high: float, inputs: LossInputs) -> Correction:
  return _mask((value >= low) & (value <= high), inputs)


def _mask(kept: jax.Array, inputs: LossInputs) -> Correction:
  kept = kept | ~inputs.mask_t
  return Correction(kept.astype(jnp.float32), kept, ~kept)


_SEQUENCE, _TOKEN = frozenset({'behaviour'}), frozenset({'behaviour', 'token_mask'})
_BOUNDS = '≤ {absolute_high:g}]'

TABLE = {
  'geometric_mask': Box(
    geometric_mask, formula=f'1[{{absolute_low:g}} ≤ (Π w)^(1/n) {_BOUNDS}', tags=_SEQUENCE
  ),
  'product_mask': Box(
    product_mask, formula=f'1[{{absolute_low:g}} ≤ Π w {_BOUNDS}', tags=_SEQUENCE
  ),
  'outlier_mask': Box(
    outlier_mask, formula=f'1[every {{absolute_low:g}} ≤ w {_BOUNDS}', tags=_SEQUENCE
  ),
  'opsm': Box(opsm, formula='1[A ≥ 0 or −E log u ≤ {delta_log_high:g}]', tags=_SEQUENCE),
  'tv_mask': Box(tv_mask, formula='1[E|w − 1| ≤ {delta:g} or A log w ≤ 0]', tags=_TOKEN),
  'second_moment_mask': Box(
    second_moment_mask,
    formula='1[E(log u)² ≤ {absolute_high:g} over {tokens} tokens]',
    tags=_TOKEN,
    batch_statistics=second_moment_statistics,
  ),
}
