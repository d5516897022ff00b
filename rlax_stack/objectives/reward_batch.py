"""What the boxes on the host read: the rewards of a batch of ragged groups, flat over trajectories.

Numpy, before packing. Not for log-probs on the device, nor for how a trajectory's rewards lie over its
tokens (`process_rewards.py`). Invariant: `reward` is finite, and every trajectory of a group has the
same index in `group`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlax_stack.errors import ConfigError, DataError, RewardError
from rlax_stack.objectives.process_rewards import Steps, spread, steps_of, turn_of_tokens, with_rest
from rlax_stack.types import FinishReason, Group, Trajectory

TokenValues = tuple[np.ndarray, ...]  # one array per trajectory, one value per trained token


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardBatch:
  """One batch, B trajectories in the order of their groups; changed with `dataclasses.replace`.

  `keep` is False for trajectories that shaping takes out of the loss: they still count in the
  baseline of their group. `steps` are the shares of `reward` that belong to single steps; without
  process rewards they are empty. `greedy_reward` is there for boxes tagged 'greedy', `trajectories`
  and `metadata` (of the prompts) for boxes that need more than the arrays; `log_probs_t` and
  `anchor_log_probs_t` for boxes tagged 'host_scores' only.
  """

  reward: np.ndarray  # float64 [B]
  group: np.ndarray  # int [B], 0, 0, 0, 1, 1, ...
  length: np.ndarray  # int [B], trained tokens
  sampled: np.ndarray  # int [B], sampled tokens
  truncated: np.ndarray  # bool [B], ended by max_tokens
  keep: np.ndarray  # bool [B]
  turn_t: TokenValues  # int, turn of every trained token, counted from 0
  version_t: TokenValues  # int, weights version that sampled it
  steps: tuple[Steps, ...]
  greedy_reward: np.ndarray | None = None  # float64 [B], of the group's greedy sample
  trajectories: tuple[Trajectory, ...] = ()
  metadata: tuple[Mapping[str, Any], ...] = ()
  log_probs_t: TokenValues | None = None
  anchor_log_probs_t: TokenValues | None = None

  @property
  def whole_steps(self) -> tuple[Steps, ...]:
    """All of each trajectory's reward by steps; see `with_rest`."""
    parts = zip(self.steps, self.reward, self.length, strict=True)
    return tuple(with_rest(steps, reward, length) for steps, reward, length in parts)

  @property
  def token_reward_t(self) -> TokenValues:
    """Reward of every trained token, float64: that of a step at its last token, else 0.

    Without process rewards the trajectory's reward is at its last token.
    """
    return tuple(spread(s, n) for s, n in zip(self.whole_steps, self.length, strict=True))


def from_groups(groups: Sequence[Group]) -> RewardBatch:
  """The batch of scored groups.

  Raises:
    DataError: a trajectory without a reward, or steps or roles that do not fit its turns.
    RewardError: a reward that is NaN or infinite.
  """
  trajectories = tuple(t for group in groups for t in group.trajectories)
  for group in groups:
    if any(t.reward is None or t.reward.value is None for t in group.trajectories):
      raise DataError(
        f'group {group.group_id} has a trajectory without a reward. Score it or drop it first.'
      )
  reward = _values(trajectories)
  greedy = [group.greedy for group in groups for _ in group.trajectories]
  drawn = [trajectory for trajectory in greedy if trajectory is not None]
  return RewardBatch(
    reward=reward,
    group=np.repeat(np.arange(len(groups)), [len(g.trajectories) for g in groups]),
    length=np.array([int(t.mask_t.sum()) for t in trajectories], np.int64),
    sampled=np.array([t.num_sampled for t in trajectories], np.int64),
    truncated=np.array([t.finish_reason == FinishReason.LENGTH for t in trajectories], bool),
    keep=np.ones(len(trajectories), bool),
    turn_t=tuple(turns(t) for t in trajectories),
    version_t=tuple(np.asarray(t.version_t)[np.asarray(t.mask_t)] for t in trajectories),
    steps=tuple(steps_of(t) for t in trajectories),
    greedy_reward=_values(drawn) if len(drawn) == len(greedy) else None,
    trajectories=trajectories,
    metadata=tuple(group.prompt.metadata for group in groups for _ in group.trajectories),
  )


def _values(trajectories: Sequence[Trajectory]) -> np.ndarray:
  """Rewards, float64."""
  rewards = [t.reward.value if t.reward is not None else None for t in trajectories]
  reward = np.asarray(rewards, np.float64)
  if not np.isfinite(reward).all():
    raise RewardError(
      f'rewards must be finite, got {reward.tolist()}. A failed verifier is a failure, not NaN.'
    )
  return reward


def turns(trajectory: Trajectory) -> np.ndarray:
  """Turn of every trained token, int32 [n]: uninterrupted runs of sampled tokens, from 0."""
  return turn_of_tokens(trajectory)[np.asarray(trajectory.mask_t)]


def groups_of(batch: RewardBatch) -> list[np.ndarray]:
  """Indices of the trajectories of each group, in the order of the groups."""
  return [np.flatnonzero(batch.group == group) for group in np.unique(batch.group)]


def compared_groups(batch: RewardBatch) -> list[np.ndarray]:
  """`groups_of` for estimators that compare the samples of a group.

  Raises:
    ConfigError: a group of fewer than two samples: no baseline can be made from one.
  """
  groups = groups_of(batch)
  smallest = min((member.size for member in groups), default=2)
  if smallest < 2:
    raise ConfigError(
      f'a group estimator needs at least 2 samples per group, got {smallest}. '
      'Raise the group size, or drop groups that lost their samples.'
    )
  return groups


def by_group(batch: RewardBatch, estimate: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
  """`estimate(rewards of one group)` for every group, float64 [B].

  A group whose rewards are all equal gets exactly 0: it says nothing, and the mean of equal
  numbers may differ from them in the last bit.

  Raises:
    ConfigError: see `compared_groups`.
  """
  return by_member(batch, lambda member: estimate(batch.reward[member]))


def by_member(batch: RewardBatch, estimate: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
  """`by_group` for estimators that need more than rewards: `estimate(indices of one group)`."""
  out = np.zeros(batch.reward.shape, np.float64)
  for member in compared_groups(batch):
    rewards = batch.reward[member]
    if not (rewards == rewards[0]).all():
      out[member] = estimate(member)
  return out
