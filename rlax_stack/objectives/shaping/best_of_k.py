"""Rewards of the best of k samples, for any advantage estimator to take over from.

Not for the estimator with a baseline of its own (`advantages/best_of_k.py`). Invariant: a reward
depends only on the rewards of its own group.
"""

import dataclasses
import math
from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch, groups_of


def max_at_k_reward(batch: RewardBatch, *, k: Annotated[int, Range(1)] = 2) -> RewardBatch:
  """Mean, over the sets of k samples of the group that a sample is in, of the best reward.

  Rᵢ ← Σⱼ wᵢⱼ Rⱼ / C(G − 1, k − 1),  R sorted upwards,
  wᵢᵢ = C(i − 1, k − 1),  wᵢⱼ = C(j − 2, k − 2) for j > i, else 0

  The policy gradient with it is an unbiased one of E[max of k rewards], up to the factor k. A group
  of fewer than k samples takes k as its size. Divided by: the number of sets. Gradient flows through:
  nothing (numpy).
  See "The Best of N Worlds", Bagirov et al. (https://arxiv.org/abs/2510.23393), equations 8 and 9,
  the on-policy form.

  Args:
    batch: see RewardBatch.
    k: samples of which the best counts; with the group's size all rewards become equal.
  """
  out = np.empty(batch.reward.shape)
  for member in groups_of(batch):
    order = member[np.argsort(batch.reward[member], kind='stable')]
    ranked, size = batch.reward[order], order.size
    chosen = min(k, size)
    own = np.array([math.comb(rank, chosen - 1) for rank in range(size)], np.float64)
    if chosen == 1:
      out[order] = ranked
      continue
    other = np.array([math.comb(max(rank - 1, 0), chosen - 2) for rank in range(size)], np.float64)
    other[0] = 0.0  # the lowest is above none
    above = np.append(np.cumsum((other * ranked)[::-1])[::-1][1:], 0.0)
    out[order] = (own * ranked + above) / math.comb(size - 1, chosen - 1)
  return dataclasses.replace(batch, reward=out)


TABLE = {'max_at_k_reward': Box(max_at_k_reward, formula='R = E[max of {k} with it]')}
