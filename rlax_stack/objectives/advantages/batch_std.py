"""Advantages that are scaled by a standard deviation of the whole batch.

Not for baselines: those are the group's or the batch's mean. Invariant: the scale is one number for
the batch, so groups keep their relative size.
"""

from typing import Annotated

import numpy as np

from rlax_stack.objectives.advantages.group import group_center
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch


def group_center_batch_std(
  batch: RewardBatch,
  *,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> np.ndarray:
  """Mean of the group, standard deviation of the batch's rewards (Lite PPO).

  Aᵢ = (Rᵢ − μ_g) / (s + ε),  s the standard deviation of all B rewards

  Divided by: the batch's standard deviation. Gradient flows through: nothing (numpy).
  See "Tricks or Traps? A Deep Dive into RL for LLM Reasoning", Liu et al.
  (https://arxiv.org/abs/2508.08221).

  Args:
    batch: ragged groups of at least 2.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64 [B].
  """
  centred = group_center(batch)
  return centred / (batch.reward.std(ddof=ddof) + eps) if centred.any() else centred


def batch_whiten(
  batch: RewardBatch,
  *,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> np.ndarray:
  """Mean and standard deviation of all rewards of the batch: no group is needed.

  Aᵢ = (Rᵢ − μ) / (s + ε)

  Divided by: the batch's standard deviation. Gradient flows through: nothing (numpy).
  See "Tricks or Traps? A Deep Dive into RL for LLM Reasoning", Liu et al.
  (https://arxiv.org/abs/2508.08221), which compares it with normalisation by group.

  Args:
    batch: of at least 2 trajectories.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64 [B]; exactly 0 where all rewards are equal.
  """
  rewards = batch.reward
  if rewards.size < 2 or (rewards == rewards[0]).all():
    return np.zeros(rewards.shape, np.float64)
  return (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + eps)


TABLE = {
  'group_center_batch_std': Box(
    group_center_batch_std,
    formula='A = (R − μ_g)/(s_batch + {eps:g})',
    tags=frozenset({'group', 'batch'}),
  ),
  'batch_whiten': Box(
    batch_whiten, formula='A = (R − μ_batch)/(s_batch + {eps:g})', tags=frozenset({'batch'})
  ),
}
