"""Answers that come near the limit or are cut off by it.

Not for length within the limit (`length.py`). Invariant: lengths are in sampled tokens.
"""

import dataclasses
from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch


def overlong_penalty(
  batch: RewardBatch,
  *,
  max_tokens: Annotated[int, Range(1)] = 0,
  buffer_fraction: Annotated[float, Range(0.0, 1.0)] = 0.2,
  penalty: Annotated[float, Range(0.0)] = 1.0,
) -> RewardBatch:
  """Takes from the reward of answers that come near the limit, linearly in tokens.

  Rᵢ += min(−(|yᵢ| − (L − b)) / b · p, 0),  b = buffer_fraction · L

  Divided by: nothing. Gradient flows through: nothing (numpy).
  See "DAPO", Yu et al. (https://arxiv.org/abs/2503.14476), whose buffer is 4,096 of 20,480 tokens.

  Args:
    batch: see RewardBatch.
    max_tokens: L; 0 takes config.rollout.max_tokens.
    buffer_fraction: share of L in which the penalty grows from 0 to p.
    penalty: p.
  """
  buffer = max(buffer_fraction * max_tokens, 1.0)
  over = (batch.sampled - (max_tokens - buffer)) / buffer
  return dataclasses.replace(batch, reward=batch.reward + np.minimum(-over * penalty, 0.0))


def mask_truncated(batch: RewardBatch) -> RewardBatch:
  """Leaves answers that were cut off at max_tokens out of the loss.

  mᵢₜ = 0 where yᵢ was truncated

  Divided by: its tokens leave every denominator; its reward stays in the baseline of its group.
  Gradient flows through: nothing (numpy).
  See "DAPO", Yu et al. (https://arxiv.org/abs/2503.14476), overlong filtering.

  Args:
    batch: see RewardBatch.
  """
  return dataclasses.replace(batch, keep=batch.keep & ~batch.truncated)


def truncated_reward(batch: RewardBatch, *, value: float = -0.2) -> RewardBatch:
  """Gives answers that were cut off at max_tokens one reward, whatever the verifier said.

  Rᵢ = v where yᵢ was truncated

  Divided by: nothing. Gradient flows through: nothing (numpy).
  See "AgentRL", Zhang et al. (https://arxiv.org/abs/2510.04206), which takes 0.2 from what ends
  abnormally.

  Args:
    batch: see RewardBatch.
    value: v.
  """
  return dataclasses.replace(batch, reward=np.where(batch.truncated, value, batch.reward))


TABLE = {
  'overlong_penalty': Box(
    overlong_penalty, formula='R −= {penalty:g}·overlong(L={max_tokens}, b={buffer_fraction:g}·L)'
  ),
  'mask_truncated': Box(mask_truncated, formula='m = 0 if truncated'),
  'truncated_reward': Box(truncated_reward, formula='R = {value:g} if truncated'),
}
