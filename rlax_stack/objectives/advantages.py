"""Advantages of whole trajectories from the rewards of their group. Numpy, on the host, before
packing.

Not for per-token credit (a critic, GAE). Invariant: groups are ragged, and an advantage depends
only on the rewards of its own group, never on how groups are batched.
"""

from collections.abc import Sequence

import numpy as np

from rlax_stack.errors import ConfigError, RewardError

ESTIMATORS = ('center', 'std', 'leave_one_out')


def group_advantages(
  rewards: Sequence[float] | np.ndarray, *, estimator: str, eps: float = 1e-6
) -> np.ndarray:
  """Advantages of one group, one per sample.

  center:        Aᵢ = Rᵢ − μ                     "Understanding R1-Zero-Like Training",
    arxiv.org/abs/2503.20783
  std:           Aᵢ = (Rᵢ − μ) / (s + ε)         "DeepSeekMath", arxiv.org/abs/2402.03300; s has
    ddof 1
  leave_one_out: Aᵢ = Rᵢ − mean of the others    "Back to Basics", arxiv.org/abs/2402.14740

  Divided by: nothing beyond the group's own standard deviation.
  Gradient flows through: nothing (numpy).

  Args:
    rewards: the G rewards of the group, finite.
    estimator: one of ESTIMATORS.
    eps: added to the standard deviation; with equal rewards every advantage is exactly 0.

  Returns: float32 [G], computed in float64.

  Raises:
    ConfigError: an unknown estimator, or fewer than two samples (no baseline can be made from one).
    RewardError: a reward that is NaN or infinite.
  """
  values = np.asarray(rewards, np.float64)
  if estimator not in ESTIMATORS:
    raise ConfigError(f'unknown advantage {estimator=}. Set it to one of {ESTIMATORS}.')
  if values.ndim != 1 or values.size < 2:
    raise ConfigError(
      f'a group estimator needs at least 2 samples per group, got {values.size}. '
      'Raise the group size, or drop groups that lost their samples.'
    )
  if not np.isfinite(values).all():
    raise RewardError(
      f'rewards must be finite, got {values.tolist()}. A failed verifier is a failure, not NaN.'
    )
  # Equal rewards say nothing; the float64 mean of equal numbers may differ from them in the last
  # bit.
  if (values == values[0]).all():
    return np.zeros(values.shape, np.float32)
  centred = values - values.mean()
  if estimator == 'std':
    centred = centred / (values.std(ddof=1) + eps)
  elif estimator == 'leave_one_out':
    centred = centred * (values.size / (values.size - 1))
  return centred.astype(np.float32)


def batch_advantages(
  rewards: Sequence[float] | np.ndarray,
  group_index: Sequence[int] | np.ndarray,
  *,
  estimator: str,
  eps: float = 1e-6,
) -> np.ndarray:
  """`group_advantages` over a flat batch of ragged groups.

  Args:
    rewards: [B].
    group_index: int [B], the group of each sample, in any order.
    estimator: one of ESTIMATORS.
    eps: see `group_advantages`.

  Returns: float32 [B].
  """
  values, groups = np.asarray(rewards, np.float64), np.asarray(group_index)
  if values.shape != groups.shape:
    raise ConfigError(f'one group index per reward, got shapes {values.shape} and {groups.shape}.')
  advantages = np.zeros(values.shape, np.float32)
  for group in np.unique(groups):
    member = groups == group
    advantages[member] = group_advantages(values[member], estimator=estimator, eps=eps)
  return advantages
