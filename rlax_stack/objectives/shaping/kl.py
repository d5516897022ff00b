"""The distance from the starting weights as a part of the reward.

Not for the KL as a term of the loss (`regularisers/kl.py`). Invariant: the distance is a sum over
trained tokens.
"""

import dataclasses
from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch


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
  'kl_reward': Box(
    kl_reward, formula='R −= {coef:g}·Σ log π/π_anchor', tags=frozenset({'host_scores'})
  ),
}
