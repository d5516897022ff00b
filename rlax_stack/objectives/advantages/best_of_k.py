"""Advantages for the best of k samples instead of the mean of one: pass@k, max@k.

On-policy forms. Not for evaluation. Invariant: an advantage depends only on the rewards of its own
group; where a group has fewer than k samples, k is its size.
"""

import math
from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch, by_group


def max_at_k(batch: RewardBatch, *, k: Annotated[int, Range(2)] = 2) -> np.ndarray:
  """How much a sample raises the maximum of the sets of k samples that it is in (PKPO, loo − 1).

  Aᵢ = G / C(G, k) · Σ_{I ∋ i, |I| = k} [max_{j∈I} Rⱼ − max_{j∈I∖i} Rⱼ]

  The mean of Aᵢ ∇log πᵢ over the group is an unbiased gradient of E[max of k rewards], pass@k for
  rewards of 0 and 1. Divided by: the number of sets. Gradient flows through: nothing (numpy).
  See "Pass@K Policy Optimization", Walder and Karkhanis (https://arxiv.org/abs/2505.15201), equation
  33, here times G because the caller takes a mean and not a sum over the group.

  Args:
    batch: ragged groups of at least 2.
    k: samples of which the best counts.

  Returns: float64 [B], 0 or more.
  """

  def estimate(rewards: np.ndarray) -> np.ndarray:
    size = rewards.size
    chosen = min(k, size)
    order = np.argsort(rewards, kind='stable')
    ranked = rewards[order]
    # Sample `rank` raises the maximum of exactly those sets whose other members rank below it; with
    # `best` the highest of them, the k − 2 that are left rank below `best`.
    sets = np.array([math.comb(best, chosen - 2) for best in range(size)], np.float64)
    gains = [(sets[:rank] * (ranked[rank] - ranked[:rank])).sum() for rank in range(size)]
    out = np.empty(size)
    out[order] = np.array(gains) * size / math.comb(size, chosen)
    return out

  return by_group(batch, estimate)


def pass_at_k(
  batch: RewardBatch, *, k: Annotated[int, Range(1)] = 2, correct_at: float = 0.5
) -> np.ndarray:
  """The advantage of GRPO for sets of k samples that pass when one of them does, spread over them.

  A = (1 − μ) / σ for correct samples,  (1 − μ − C(G₋ − 1, k − 1) / C(G − 1, k − 1)) / σ for others
  μ = 1 − C(G₋, k) / C(G, k),  σ² = μ (1 − μ),  G₋ the wrong samples of the group

  0 where σ = 0. Divided by: the standard deviation of the sets' results. Gradient flows through:
  nothing (numpy).
  See "Pass@k Training", Chen et al. (https://arxiv.org/abs/2508.10751), equations 11 to 15.

  Args:
    batch: ragged groups of at least 2.
    k: samples of which one has to be correct; well below the group's size, or all sets pass.
    correct_at: rewards of this much or more are correct.

  Returns: float64 [B].
  """

  def estimate(rewards: np.ndarray) -> np.ndarray:
    size, correct = rewards.size, rewards >= correct_at
    chosen, wrong = min(k, size), int((~correct).sum())
    mean = 1.0 - math.comb(wrong, chosen) / math.comb(size, chosen)
    spread = math.sqrt(mean * (1.0 - mean))
    if spread == 0.0:
      return np.zeros(size)
    failing = math.comb(max(wrong - 1, 0), chosen - 1) / math.comb(size - 1, chosen - 1)
    return np.where(correct, 1.0 - mean, 1.0 - mean - failing) / spread

  return by_group(batch, estimate)


TABLE = {
  'max_at_k': Box(
    max_at_k,
    formula='A = G·E[max of {k} with it − max without it]',
    tags=frozenset({'group'}),
  ),
  'pass_at_k': Box(
    pass_at_k, formula='A = (pass@{k} of its sets − μ)/σ of all sets', tags=frozenset({'group'})
  ),
}
