"""Rewards of single steps, refined so that repeating steps does not pay.

Not for advantages from them (`advantages/process.py`). Invariant: a box changes the rewards of steps and
the trajectory's reward by the sum of that; what the steps leave of the reward stays as it was, and so
does a trajectory without process rewards.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch


def process_clip(batch: RewardBatch, *, absolute_high: float = 0.5) -> RewardBatch:
  """Takes a threshold from the rewards of steps and cuts them off above 0: no step adds to the sum (Clip).

  r′ᵢₖ = min(rᵢₖ − η, 0)

  Divided by: nothing. Gradient flows through: nothing (numpy).
  See "On Designing Effective RL Reward at Training Time for LLM Reasoning", Gao et al.
  (https://arxiv.org/abs/2410.15115); most steps should reach η. The default is ours.

  Args:
    batch: see RewardBatch.
    absolute_high: η, on the scale of the steps' rewards after the verifier's weight.
  """
  return _refined(batch, lambda reward: np.minimum(reward - absolute_high, 0.0))


def process_delta(batch: RewardBatch) -> RewardBatch:
  """Turns the rewards of steps into differences, so that their sum is what the first step got (Delta).

  r′ᵢₖ = rᵢₖ − rᵢ,ₖ₊₁ for k < K − 1,  rᵢₖ for k = K − 1,  0 for k = K

  The sum from step k on is its own reward; the last step is judged by what the steps leave of the
  trajectory's reward alone. Divided by: nothing. Gradient flows through: nothing (numpy).
  See "On Designing Effective RL Reward at Training Time for LLM Reasoning", Gao et al.
  (https://arxiv.org/abs/2410.15115), which applies it after `process_clip`.

  Args:
    batch: see RewardBatch.
  """

  def differences(reward: np.ndarray) -> np.ndarray:
    kept = np.append(reward[:-1], np.zeros(min(reward.size, 1)))
    return kept - np.append(kept[1:], np.zeros(min(reward.size, 1)))

  return _refined(batch, differences)


def process_min(
  batch: RewardBatch, *, temperature: Annotated[float, Range(1e-3)] = 0.1
) -> RewardBatch:
  """Weighs the rewards of steps so that their sum is close to the least of them (PURE).

  r′ᵢₖ = rᵢₖ exp(−rᵢₖ / T) / Σⱼ exp(−rᵢⱼ / T)

  Divided by: the sum of the weights. Gradient flows through: nothing (numpy).
  See "Stop Summation: Min-Form Credit Assignment Is All Process Reward Model Needs for Reasoning",
  Cheng et al. (https://arxiv.org/abs/2504.15275); the default is that of its code
  (https://github.com/CJReinforce/PURE).

  Args:
    batch: see RewardBatch.
    temperature: T, on the scale of the steps' rewards after the verifier's weight.
  """

  def weighted(reward: np.ndarray) -> np.ndarray:
    weight = np.exp((reward.min(initial=np.inf) - reward) / temperature)
    return reward * weight / np.maximum(weight.sum(), 1.0)

  return _refined(batch, weighted)


def _refined(batch: RewardBatch, refine: Callable[[np.ndarray], np.ndarray]) -> RewardBatch:
  steps = tuple(old._replace(reward=refine(old.reward)) for old in batch.steps)
  pairs = zip(steps, batch.steps, strict=True)
  change = np.array([new.reward.sum() - old.reward.sum() for new, old in pairs], np.float64)
  return dataclasses.replace(batch, steps=steps, reward=batch.reward + change)


TABLE = {
  'process_clip': Box(
    process_clip, formula='r = min(r − {absolute_high:g}, 0) of steps', tags=frozenset({'steps'})
  ),
  'process_delta': Box(
    process_delta, formula='r = r − r of the next step', tags=frozenset({'steps'})
  ),
  'process_min': Box(
    process_min, formula='r = r·softmax(−r/{temperature:g}) of steps', tags=frozenset({'steps'})
  ),
}
