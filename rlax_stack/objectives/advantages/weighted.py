"""Centred rewards with another weight: by the group's success, by length, by how much is useful.

Not for scaling by a standard deviation of the batch (`batch_std.py`, `token_std.py`). Invariant:
groups are ragged, and a group whose rewards are all equal gets exactly 0.
"""

from typing import Annotated

import numpy as np

from rlax_stack.objectives.advantages.group import group_center
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch, by_group, by_member


def max_rl(batch: RewardBatch) -> np.ndarray:
  """Centred reward over the mean of the group: hard prompts weigh more (MaxRL).

  Aᵢ = (Rᵢ − μ_g) / μ_g,  0 where μ_g ≤ 0

  For rewards of 0 and 1 the policy gradient is then an unbiased one of log p(correct), cut off after
  G − 1 terms of its series. Divided by: the group's mean reward. Gradient flows through: nothing
  (numpy).
  See "Maximum Likelihood Reinforcement Learning", Tajwar et al. (https://arxiv.org/abs/2602.02710);
  no ε is added to the mean, as in its algorithm 1.

  Args:
    batch: ragged groups of at least 2, rewards of 0 or more.

  Returns: float64 [B].
  """
  return by_group(batch, lambda r: (r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros(r.shape))


def length_weighted(batch: RewardBatch) -> np.ndarray:
  """Reward minus the mean of the group weighted by length, the baseline of least variance (OPO).

  Aᵢ = Rᵢ − Σⱼ nⱼ Rⱼ / Σⱼ nⱼ,  nⱼ trained tokens of sample j

  Divided by: nothing. Gradient flows through: nothing (numpy).
  See "On-Policy RL with Optimal Reward Baseline", Hao et al. (https://arxiv.org/abs/2505.23585).

  Args:
    batch: ragged groups of at least 2.

  Returns: float64 [B].
  """

  def estimate(member: np.ndarray) -> np.ndarray:
    rewards, length = batch.reward[member], batch.length[member]
    return rewards - (length * rewards).sum() / max(length.sum(), 1)

  return by_member(batch, estimate)


def useful_share(batch: RewardBatch) -> np.ndarray:
  """Centred reward, scaled up by the samples whose groups say nothing (GPG).

  Aᵢ = (Rᵢ − μ_g) · B / (B − M),  M the samples of groups whose rewards are all equal

  Divided by: the share of useful samples, so that they alone are the mean's denominator. Gradient
  flows through: nothing (numpy).
  See "GPG", Chu et al. (https://arxiv.org/abs/2504.02546), equations 6 to 8 with F_norm = 1.

  Args:
    batch: ragged groups of at least 2.

  Returns: float64 [B].
  """
  useful = by_group(batch, lambda r: np.ones(r.shape)).sum()
  centred = group_center(batch)
  return centred * (batch.reward.size / useful) if useful else centred


def difficulty_weighted(
  batch: RewardBatch,
  *,
  least: Annotated[float, Range(0.0)] = 0.4,
  most: Annotated[float, Range(0.0)] = 1.5,
  midpoint: Annotated[float, Range(0.0, 1.0)] = 0.75,
  steepness: float = 10.0,
  correct_at: float = 0.5,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> np.ndarray:
  """The advantage of GRPO, weighted by how rare success is: right answers to hard prompts and
  wrong ones to easy prompts count most (GRPO-LEAD).

  Aᵢ = Âᵢ w(ρ_g) where Âᵢ > 0, else Âᵢ w(1 − ρ_g),  Âᵢ = (Rᵢ − μ_g) / (s_g + ε)
  w(x) = a + (b − a) / (1 + exp(k (x − x₀))),  ρ_g the share of correct samples

  Divided by: the group's own standard deviation. Gradient flows through: nothing (numpy).
  See "GRPO-LEAD", Zhang and Zuo (https://arxiv.org/abs/2504.09696); values as in its code
  (https://github.com/aeroplanepaper/GRPO-LEAD).

  Args:
    batch: ragged groups of at least 2.
    least: a, the weight of what is expected.
    most: b, the weight of what is rare.
    midpoint: x₀, the share at which the weight is halfway.
    steepness: k.
    correct_at: rewards of this much or more are correct.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64 [B].
  """

  def weight(share: float) -> float:
    return least + (most - least) / (1.0 + np.exp(steepness * (share - midpoint)))

  def estimate(rewards: np.ndarray) -> np.ndarray:
    share = (rewards >= correct_at).mean()
    adv = (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + eps)
    return adv * np.where(adv > 0, weight(share), weight(1.0 - share))

  return by_group(batch, estimate)


def signed(
  batch: RewardBatch,
  *,
  positive: Annotated[float, Range(0.0)] = 0.1,
  negative: Annotated[float, Range(0.0)] = 1.0,
  correct_at: float = 0.5,
) -> np.ndarray:
  """A constant for right answers and one for wrong ones; no baseline and no group.

  Aᵢ = λ where Rᵢ ≥ c, else −ν

  λ = 1, ν = 0 is positive, λ = 0, ν = 1 negative sample reinforcement, λ = 0.1, ν = 1
  W-REINFORCE. Divided by: nothing. Gradient flows through: nothing (numpy).
  See "The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning", Zhu et al.
  (https://arxiv.org/abs/2506.01347).

  Args:
    batch: any; groups are not read.
    positive: λ.
    negative: ν.
    correct_at: c.

  Returns: float64 [B].
  """
  return np.where(batch.reward >= correct_at, positive, -negative).astype(np.float64)


_GROUP = frozenset({'group'})

TABLE = {
  'max_rl': Box(max_rl, formula='A = (R − μ_g)/μ_g', tags=_GROUP),
  'length_weighted': Box(length_weighted, formula='A = R − Σ nR/Σ n over the group', tags=_GROUP),
  'useful_share': Box(
    useful_share, formula='A = (R − μ_g)·B/(B − M)', tags=frozenset({'group', 'batch'})
  ),
  'difficulty_weighted': Box(
    difficulty_weighted,
    formula='A = (R − μ_g)/(s_g + {eps:g}) · w(ρ_g), w from {least:g} to {most:g}',
    tags=_GROUP,
  ),
  'signed': Box(signed, formula='A = {positive:g} if R ≥ {correct_at:g} else −{negative:g}'),
}
