"""Advantages of whole trajectories from the rewards of their group.

Not for per-token credit. Invariant: groups are ragged, and an advantage depends only on the rewards
of its own group, never on how groups are batched.
"""

from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch, by_group


def group_center(batch: RewardBatch) -> np.ndarray:
  """Reward minus the mean of the group; the advantage of Dr.GRPO.

  Aᵢ = Rᵢ − μ_g

  Divided by: nothing. Gradient flows through: nothing (numpy).
  See "Understanding R1-Zero-Like Training", Liu et al. (https://arxiv.org/abs/2503.20783).

  Args:
    batch: ragged groups of at least 2.

  Returns: float64 [B].
  """
  return by_group(batch, lambda rewards: rewards - rewards.mean())


def group_std(
  batch: RewardBatch,
  *,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> np.ndarray:
  """Centred reward over the standard deviation of the group; the advantage of GRPO.

  Aᵢ = (Rᵢ − μ_g) / (s_g + ε),  s_g² = Σ (Rⱼ − μ_g)² / (G − ddof)

  Divided by: the group's own standard deviation. Gradient flows through: nothing (numpy).
  See "DeepSeekMath", Shao et al. (https://arxiv.org/abs/2402.03300).

  Args:
    batch: ragged groups of at least 2.
    ddof: 1 for the sample's standard deviation (most implementations), 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64 [B].
  """
  return by_group(batch, lambda r: (r - r.mean()) / (r.std(ddof=ddof) + eps))


def leave_one_out(batch: RewardBatch) -> np.ndarray:
  """Reward minus the mean of the other samples of the group (RLOO).

  Aᵢ = Rᵢ − Σ_{j≠i} Rⱼ / (G − 1) = (Rᵢ − μ_g) · G / (G − 1)

  Divided by: nothing. Gradient flows through: nothing (numpy).
  See "Back to Basics", Ahmadian et al. (https://arxiv.org/abs/2402.14740).

  Args:
    batch: ragged groups of at least 2.

  Returns: float64 [B].
  """
  return by_group(batch, lambda r: (r - r.mean()) * (r.size / (r.size - 1)))


_GROUP = frozenset({'group'})

TABLE = {
  'group_center': Box(group_center, formula='A = R − μ_g', tags=_GROUP),
  'group_std': Box(group_std, formula='A = (R − μ_g)/(s_g + {eps:g})', tags=_GROUP),
  'leave_one_out': Box(leave_one_out, formula='A = R − mean of the others', tags=_GROUP),
}
