"""The baseline that makes the off-policy gradient of a group least noisy (VCPO).

Not for step sizes (`ess_step` of the corrections). Invariant: the norms are of the whole gradient of
each trajectory, never of a stand-in; they cost a backward pass each.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.objectives import ratios, segments
from rlax_stack.objectives.boxes import Box
from rlax_stack.objectives.inputs import LossInputs
from rlax_stack.objectives.reward_batch import RewardBatch, by_group

_TINY = 1e-8


def minimum_variance(batch: RewardBatch, *, by_std: bool = True) -> np.ndarray:
  """Reward minus a mean over the group that weighs where the gradient is large.

  Aᵢ = (Rᵢ − b) / s_g,  b = Σⱼ wⱼ² ‖gⱼ‖² Rⱼ / Σⱼ wⱼ² ‖gⱼ‖²,  gⱼ = ∇ Σₜ log πₜ and wⱼ = Π πₜ / π_behaviour,ₜ of j
  s_g² = Σ (Rⱼ − μ_g)² / G, or s_g = 1

  Divided by: the weights; s_g. Gradient flows through: nothing. One backward pass for each trajectory
  gives ‖g‖, in the learner (`weighed_baseline`); here, on the host, all weights are equal.
  See "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", Huang et al.
  (https://arxiv.org/abs/2602.17616), and its code (https://github.com/mit-han-lab/vcpo).

  Args:
    batch: ragged groups of at least 2.
    by_std: whether to divide by s_g, as its scripts do.

  Returns: float64 [B].
  """

  def estimate(rewards: np.ndarray) -> np.ndarray:
    centred = rewards - rewards.mean()
    return centred / rewards.std() if by_std else centred

  return by_group(batch, estimate)


def weighed_baseline(
  inputs: LossInputs,
  *,
  gradient_norms: jax.Array,
  by_std: bool = True,
) -> jax.Array:
  """Advantages of `minimum_variance` under the current weights.

  Args:
    inputs: [M, rows, N].
    gradient_norms: ‖g‖² of each token's trajectory.
    by_std: see `minimum_variance`.
  """
  mask = inputs.mask_t
  current = jax.lax.stop_gradient(inputs.log_probs_t)
  log_ratio = ratios.log_ratio(current, inputs.behaviour_log_probs_t, mask)
  ratio = ratios.exp(segments.run_sum(log_ratio, mask, inputs.trajectory_t))
  weight = ratio**2 * gradient_norms
  start = segments.run_start(mask, inputs.trajectory_t)

  def over_group(value):
    return segments.batch_sum(jnp.where(start, value, 0.0), mask, inputs.group_t)

  size = jnp.maximum(over_group(jnp.ones_like(weight)), 1.0)
  centred = jnp.where(mask, inputs.reward_t - over_group(inputs.reward_t) / size, 0.0)
  total = over_group(weight)
  baseline = over_group(weight * centred) / jnp.where(total > 0.0, total, 1.0)
  spread = jnp.sqrt(over_group(centred * centred) / size)
  scale = jnp.where(spread > _TINY, spread, 1.0) if by_std else jnp.ones_like(spread)
  return jnp.where(mask & (spread > _TINY), (centred - baseline) / scale, 0.0)


TABLE = {
  'minimum_variance': Box(
    minimum_variance,
    formula='A = (R − E[w²‖g‖²R]/E[w²‖g‖²])/s_g',
    tags=frozenset({'group', 'behaviour'}),
    token_advantages=weighed_baseline,
  )
}
