"""Corrections that need the importance weights of the whole batch.

Not for masks. Invariant: their scalars are the same on every device and for every micro-batch.
"""

from typing import Annotated, Literal

import jax.numpy as jnp

from rlax_stack.objectives import segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.corrections.importance import log_weight, sequence_tis, token_tis
from rlax_stack.objectives.inputs import Correction, LossInputs, Statistics

Level = Literal['token', 'sequence']


def weight_mean(
  inputs: LossInputs,
  *,
  absolute_high: Annotated[float, Range(0.0)] = 2.0,
  level: Level = 'token',
) -> Statistics:
  """Mean truncated weight of the batch: over its tokens, or over its sequences."""
  weight = _truncated(inputs, absolute_high, level).weight_t
  counted = inputs.mask_t
  if level == 'sequence':
    counted = segments.run_start(inputs.mask_t, inputs.trajectory_t)
  total = jnp.sum(jnp.where(counted, weight, 0.0))
  mean = total / jnp.maximum(jnp.sum(counted.astype(jnp.float32)), 1.0)
  return Statistics(scalars={'mean': mean})


def self_normalised_tis(
  inputs: LossInputs,
  *,
  statistics: Statistics,
  absolute_high: Annotated[float, Range(0.0)] = 2.0,
  level: Level = 'token',
) -> Correction:
  """Truncated importance weight over its own mean: the weights of a batch have mean 1.

  wₜ' = min(wₜ, C) / E[min(w, C)],  wₜ = π_proximal,ₜ / π_behaviour,ₜ or its product over a sequence

  Divided by: the batch's mean over tokens or over sequences. Gradient flows through: nothing.
  See the batch normalisation of weights in verl (https://github.com/volcengine/verl,
  docs/algo/rollout_corr_math.md).

  Args:
    inputs: [rows, N].
    statistics: from `weight_mean`.
    absolute_high: C, before the division.
    level: 'token', or 'sequence' for the product over a trajectory.
  """
  one = _truncated(inputs, absolute_high, level)
  mean = statistics.scalars['mean']
  return one._replace(weight_t=one.weight_t / jnp.maximum(mean, 1e-8))


def _truncated(inputs: LossInputs, absolute_high: float, level: Level) -> Correction:
  weigh = token_tis if level == 'token' else sequence_tis
  return weigh(inputs, absolute_high=absolute_high)


def ess_scale(
  inputs: LossInputs,
  *,
  on_policy_fraction: Annotated[float, Range(1e-3, 1.0)] = 1.0,
  rule: Literal['sqrt', 'linear'] = 'sqrt',
) -> Statistics:
  """The factor of the step; see `ess_step`."""
  starts = segments.run_start(inputs.mask_t, inputs.trajectory_t)
  log_w = segments.run_sum(log_weight(inputs), inputs.mask_t, inputs.trajectory_t)
  # The largest weight is made 1: the fraction stays, and nothing overflows.
  log_w = log_w - jnp.max(jnp.where(starts, log_w, -jnp.inf))
  weight = jnp.where(starts, jnp.exp(jnp.where(starts, log_w, 0.0)), 0.0)
  count = jnp.maximum(jnp.sum(starts.astype(jnp.float32)), 1.0)
  fraction = jnp.sum(weight) ** 2 / (count * jnp.sum(weight * weight))
  scale = jnp.minimum(fraction / on_policy_fraction, 1.0)
  return Statistics(step_scale=jnp.sqrt(scale) if rule == 'sqrt' else scale)


def ess_step(
  inputs: LossInputs,
  *,
  on_policy_fraction: Annotated[float, Range(1e-3, 1.0)] = 1.0,
  rule: Literal['sqrt', 'linear'] = 'sqrt',
) -> Correction:
  """Weighs nothing, but takes a shorter step where few sequences carry the batch.

  η' = η √min(ESS / (B ρ), 1),  ESS = (Σᵢ wᵢ)² / Σᵢ wᵢ²,  wᵢ = Π π_proximal,ₜ / π_behaviour,ₜ

  Divided by: B, the trajectories of the batch. Gradient flows through: nothing; the optimizer's
  update is scaled, its moments are not.
  See "Stable Asynchrony", Huang et al. (https://arxiv.org/abs/2602.17616), VCPO's step scaling; its
  off-policy baseline is the advantage `minimum_variance`.

  Args:
    inputs: [rows, N].
    on_policy_fraction: ρ, the fraction at which the step is whole.
    rule: 'sqrt' for optimizers such as Adam, or 'linear'.
  """
  del on_policy_fraction, rule
  ones = jnp.ones(inputs.mask_t.shape, jnp.float32)
  return Correction(ones, ones > 0.0, ones < 0.0)


TABLE = {
  'self_normalised_tis': Box(
    self_normalised_tis,
    formula='min(w_{level}, {absolute_high:g})/E[min(w_{level}, {absolute_high:g})]',
    tags=frozenset({'importance'}),
    batch_statistics=weight_mean,
  ),
  'ess_step': Box(
    ess_step,
    formula='(step · {rule} ESS/(B·{on_policy_fraction:g}))',
    tags=frozenset({'behaviour'}),
    batch_statistics=ess_scale,
  ),
}
