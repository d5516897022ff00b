"""Reward shaping: what is added to a verifier's reward, and what is left out of the loss.

Not for advantages. Invariant: a box changes `reward` or `keep` of a RewardBatch and nothing else,
and lengths are in tokens.
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


def kl_reward(batch: RewardBatch, *, coef: Annotated[float, Range(0.0)] = 0.05) -> RewardBatch:
  """Takes the distance from the anchor from the reward, before any baseline.

  Rᵢ −= β Σₜ (log πₜ − log π_anchor,ₜ),  π the current weights, over trained tokens

  Divided by: nothing. Gradient flows through: nothing (numpy); with a policy gradient of the whole
  sequence the loss has the gradient of R − β KL(π ‖ anchor).
  See "Back to Basics", Ahmadian et al. (https://arxiv.org/abs/2402.14740). The default is
  that of TRL's trainer for it.

  Args:
    batch: with scores of the current and of the starting weights.
    coef: β.
  """
  pairs = zip(batch.log_probs_t or (), batch.anchor_log_probs_t or (), strict=True)
  distance = [np.sum(now.astype(np.float64) - then.astype(np.float64)) for now, then in pairs]
  return dataclasses.replace(batch, reward=batch.reward - coef * np.asarray(distance))


TABLE = {
  'overlong_penalty': Box(
    overlong_penalty, formula='R −= {penalty:g}·overlong(L={max_tokens}, b={buffer_fraction:g}·L)'
  ),
  'mask_truncated': Box(mask_truncated, formula='m = 0 if truncated'),
  'kl_reward': Box(
    kl_reward, formula='R −= {coef:g}·Σ log π/π_anchor', tags=frozenset({'host_scores'})
  ),
}
