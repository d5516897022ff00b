"""Rewards by length within a group: short right answers before long ones.

Not for the limit of tokens (`overlong.py`). Invariant: lengths are in sampled tokens and compared
within one group only; a group whose compared answers are equally long keeps its order.
"""

import dataclasses
from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch, groups_of


def short_first(
  batch: RewardBatch, *, weight: Annotated[float, Range(0.0)] = 1.0, correct_at: float = 0.5
) -> RewardBatch:
  """Adds a reward from 1/2 for the shortest to −1/2 for the longest answer of the group (Kimi k1.5).

  Rᵢ += w λᵢ where yᵢ is correct, w min(0, λᵢ) otherwise,  λᵢ = 1/2 − (|yᵢ| − min) / (max − min)

  0 where all answers of the group are equally long. Divided by: nothing. Gradient flows through:
  nothing (numpy).
  See "Kimi k1.5" (https://arxiv.org/abs/2501.12599), section 2.3.3.

  Args:
    batch: see RewardBatch.
    weight: w.
    correct_at: rewards of this much or more are correct.
  """
  added = np.zeros(batch.reward.shape)
  for member in groups_of(batch):
    length = batch.sampled[member]
    reach = length.max() - length.min()
    if reach > 0:
      added[member] = 0.5 - (length - length.min()) / reach
  correct = batch.reward >= correct_at
  added = np.where(correct, added, np.minimum(added, 0.0))
  return dataclasses.replace(batch, reward=batch.reward + weight * added)


def short_correct(
  batch: RewardBatch,
  *,
  alpha: Annotated[float, Range(0.0, 1.0)] = 0.1,
  correct_at: float = 0.5,
  eps: Annotated[float, Range(0.0)] = 1e-6,
) -> RewardBatch:
  """Takes a share of the reward of right answers that are long among the right ones.

  Rᵢ ← Rᵢ (1 − α σ(zᵢ)) where yᵢ is correct,  zᵢ = (|yᵢ| − μ) / (s + ε),  σ(z) = 1 / (1 + exp(−z))

  μ and s (the population's) of the lengths of the group's correct answers. Divided by: nothing.
  Gradient flows through: nothing (numpy).
  See "Training Language Models to Reason Efficiently", Arora and Zanette
  (https://arxiv.org/abs/2502.04463).

  Args:
    batch: see RewardBatch.
    alpha: α; below 1 every right answer stays above the wrong ones.
    correct_at: rewards of this much or more are correct.
    eps: added to the standard deviation.
  """
  z, correct = _standardised(batch, batch.reward >= correct_at, ddof=0, eps=eps)
  share = 1.0 - alpha / (1.0 + np.exp(-z))
  return dataclasses.replace(batch, reward=np.where(correct, batch.reward * share, batch.reward))


def length_decay(
  batch: RewardBatch,
  *,
  alpha: Annotated[float, Range(0.0)] = 0.05,
  incorrect: float = -1.0,
  correct_at: float = 0.5,
  eps: Annotated[float, Range(0.0)] = 1e-6,
) -> RewardBatch:
  """Decays the reward of right answers with their length, and punishes wrong ones (GRPO-LEAD).

  Rᵢ ← Rᵢ exp(−α zᵢ) where yᵢ is correct, −1 otherwise,  zᵢ = (|yᵢ| − μ) / (s + ε)

  μ and s (the sample's) of the lengths of the group's correct answers. Divided by: nothing. Gradient
  flows through: nothing (numpy).
  See "GRPO-LEAD", Zhang and Zuo (https://arxiv.org/abs/2504.09696). Its code leaves groups alone
  whose three shortest answers have less than 4,000 tokens in the mean; this does not.

  Args:
    batch: see RewardBatch.
    alpha: α.
    incorrect: the reward of wrong answers.
    correct_at: rewards of this much or more are correct.
    eps: added to the standard deviation.
  """
  z, correct = _standardised(batch, batch.reward >= correct_at, ddof=1, eps=eps)
  decayed = batch.reward * np.exp(-alpha * z)
  return dataclasses.replace(batch, reward=np.where(correct, decayed, incorrect))


def adaptive_length(
  batch: RewardBatch,
  *,
  coef: Annotated[float, Range(0.0)] = 0.1,
  max_tokens: Annotated[int, Range(1)] = 0,
  correct_at: float = 0.5,
) -> RewardBatch:
  """Takes from every reward what its length costs, the more the easier the prompt is (ALP).

  Rᵢ −= β |yᵢ| / L · max(ρ_g, 1 / G),  ρ_g the share of correct samples

  Divided by: L. Gradient flows through: nothing (numpy).
  See "Just Enough Thinking", Xiang et al. (https://arxiv.org/abs/2506.05256). The paper trains with
  β = 1e-7, below the ε of most estimators here; the default is ours.

  Args:
    batch: see RewardBatch.
    coef: β.
    max_tokens: L; 0 takes config.rollout.max_tokens.
    correct_at: rewards of this much or more are correct.
  """
  reward = batch.reward.copy()
  for member in groups_of(batch):
    solved = (batch.reward[member] >= correct_at).mean()
    price = coef * max(float(solved), 1.0 / member.size)
    reward[member] -= price * batch.sampled[member] / max_tokens
  return dataclasses.replace(batch, reward=reward)


def _standardised(
  batch: RewardBatch, correct: np.ndarray, *, ddof: int, eps: float
) -> tuple[np.ndarray, np.ndarray]:
  """z of the lengths of correct answers within their group, 0 elsewhere, and `correct` itself."""
  z = np.zeros(batch.reward.shape)
  for member in groups_of(batch):
    chosen = member[correct[member]]
    if chosen.size > 1:
      length = batch.sampled[chosen]
      z[chosen] = (length - length.mean()) / (length.std(ddof=ddof) + eps)
  return z, correct


TABLE = {
  'short_first': Box(short_first, formula='R += {weight:g}·(1/2 … −1/2 by length in the group)'),
  'short_correct': Box(short_correct, formula='R = R·(1 − {alpha:g}·σ(z of length)) if correct'),
  'adaptive_length': Box(
    adaptive_length, formula='R −= {coef:g}·|y|/{max_tokens}·max(solve rate, 1/G)'
  ),
  'length_decay': Box(
    length_decay, formula='R = R·exp(−{alpha:g}·z of length) if correct else {incorrect:g}'
  ),
}
