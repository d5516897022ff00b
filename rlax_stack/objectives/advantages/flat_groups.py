"""Advantages that say something where all rewards of a group are equal.

Not for dropping such groups. Invariant: groups whose rewards differ get the advantage of GRPO, of
the rewards themselves (`flat_entropy`) or of calibrated ones (`calibrated_confidence`).
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.objectives.advantages.group import group_std
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs
from rlax_stack.objectives.reward_batch import RewardBatch, compared_groups


def flat_entropy(
  batch: RewardBatch,
  *,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> np.ndarray:
  """The advantage of GRPO, and in groups of equal rewards a sign with the token's entropy (RL-ZVP).

  Aᵢₜ = (Rᵢ − μ_g) / (s_g + ε) where the rewards of the group differ, else
  Aᵢₜ = α Hᵢₜ where Rᵢ ≥ c,  Aᵢₜ = −α (maxₛ Hᵢₛ − Hᵢₜ) otherwise

  H the entropy of the current policy's distribution, held constant: uncertain tokens of right answers
  are pulled most, certain ones of wrong answers are pushed most. Divided by: the group's own standard
  deviation, where there is one. Gradient flows through: nothing.
  See "No Prompt Left Behind", Le et al. (https://arxiv.org/abs/2509.21880).

  Args:
    batch: ragged groups of at least 2.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.
    alpha: α.
    correct_at: c, of the reward after shaping.

  Returns: float64 [B]; what groups of equal rewards get is added on the device, per token.
  """
  return group_std(batch, ddof=ddof, eps=eps)


def entropy_of_flat_groups(
  inputs: LossInputs,
  *,
  alpha: Annotated[float, Range(0.0)] = 0.1,
  correct_at: float = 0.5,
) -> jax.Array:
  """`flat_entropy` with the entropies: adv_t [M, rows, N], see there."""
  mask = inputs.mask_t
  spread = _most(jnp.abs(inputs.adv_t), mask, inputs.group_t)
  peak = _most(inputs.entropy_t, mask, inputs.trajectory_t)
  correct = inputs.reward_t >= correct_at
  flat = alpha * jnp.where(correct, inputs.entropy_t, inputs.entropy_t - peak)
  return jnp.where(mask & (spread == 0.0), flat, inputs.adv_t)


def _most(value_t: jax.Array, mask_t: jax.Array, ids: jax.Array) -> jax.Array:
  """At every token the largest value, 0 or more, of all tokens of the batch with the same id."""
  flat = jnp.where(mask_t, ids, 0).reshape(-1)
  value = jnp.where(mask_t, value_t, 0.0).reshape(-1)
  most = jax.ops.segment_max(value, flat, num_segments=flat.size)
  return jnp.where(mask_t, most[flat].reshape(value_t.shape), 0.0)


def calibrated_confidence(
  batch: RewardBatch,
  *,
  alpha: Annotated[float, Range(0.0)] = 0.25,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> np.ndarray:
  """The advantage of GRPO from rewards that take most from the wrong answers held most likely (LENS).

  r̃ᵢ = Rᵢ − (1 − Rᵢ) / G · π̄ᵢ / (D − π̄ᵢ),  π̄ᵢ = exp(Σₜ log πᵢₜ / nᵢ)
  D = max(1 / (Σⱼ Rⱼ / πⱼ / G), 2 maxⱼ π̄ⱼ),  2 maxⱼ π̄ⱼ where no sample is rewarded
  Aᵢ = (r̃ᵢ − mean r̃) / (s_g + ε),  Aᵢ = α (r̃ᵢ − mean r̃) where no sample is rewarded

  π as sampled, πⱼ of the whole sequence. Divided by: the standard deviation of the calibrated rewards
  of the group, where some sample is rewarded. Gradient flows through: nothing (numpy).
  See "Don't Waste Mistakes", Feng et al. (https://arxiv.org/abs/2510.08696), section 5.

  Args:
    batch: ragged groups of at least 2, rewards from 0 to 1, with trajectories.
    alpha: α, the weight of groups in which no sample is rewarded.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64 [B].
  """
  total = np.array(
    [
      t.behaviour_log_probs_t[np.asarray(t.mask_t)].sum(dtype=np.float64)
      for t in batch.trajectories
    ]
  )
  confidence = np.exp(total / np.maximum(batch.length, 1))
  out = np.zeros(batch.reward.shape, np.float64)
  for member in compared_groups(batch):
    rewards, sure = batch.reward[member], confidence[member]
    scale = 2.0 * sure.max()
    rewarded = rewards > 0
    if rewarded.any():
      # In logarithms: a sequence of thousands of tokens has no probability in float64.
      log_terms = np.log(rewards[rewarded] / rewards.size) - total[member][rewarded]
      scale = max(np.exp(-np.logaddexp.reduce(log_terms)), scale)
    calibrated = rewards - (1.0 - rewards) / rewards.size * sure / (scale - sure)
    if (calibrated == calibrated[0]).all():
      continue
    centred = calibrated - calibrated.mean()
    spread = calibrated.std(ddof=ddof) + eps
    out[member] = centred / spread if rewarded.any() else alpha * centred
  return out


TABLE = {
  'flat_entropy': Box(
    flat_entropy,
    formula='A = (R − μ_g)/(s_g + {eps:g}), of flat groups {alpha:g}·H or {alpha:g}·(H − max H)',
    tags=frozenset({'group'}),
    token_advantages=entropy_of_flat_groups,
  ),
  'calibrated_confidence': Box(
    calibrated_confidence,
    formula='A = (r̃ − mean r̃)/(s_g + {eps:g}), r̃ = R − (1 − R)/G·π̄/(D − π̄)',
    tags=frozenset({'group'}),
  ),
}
