"""Rewards of single steps and turns: where in a trajectory its reward falls due.

Numpy. Not for shaping or advantages. Invariant: the last step of a trajectory ends at its last trained
token, so its reward and its steps speak of the same tokens.
"""

from typing import NamedTuple

import numpy as np

from rlax_stack.errors import DataError, RewardError
from rlax_stack.types import Source, Trajectory


class Steps(NamedTuple):
  """The steps of one trajectory, K of them, in order."""

  place: np.ndarray  # int [K], index of the trained token at which each ends, not descending
  reward: np.ndarray  # float64 [K]


NO_STEPS = Steps(np.zeros(0, np.int64), np.zeros(0))


def steps_of(trajectory: Trajectory) -> Steps:
  """The steps that a verifier or an environment gave rewards to; empty where none did.

  A step ends at the last trained token before its end; the last one reaches to the end of the
  trajectory.

  Raises:
    DataError: other numbers of steps or roles than the trajectory has.
    RewardError: a reward that is NaN or infinite.
  """
  turn = turn_of_tokens(trajectory)
  count = int(turn.max(initial=-1)) + 1 if trajectory.num_sampled else 0
  name = f'trajectory {trajectory.trajectory_id}'
  if trajectory.roles and len(trajectory.roles) != count:
    raise DataError(
      f'{name} has {count} turns, but {len(trajectory.roles)} roles. Give one a turn.'
    )
  values = np.asarray(trajectory.reward.step_values if trajectory.reward else (), np.float64)
  trained = np.flatnonzero(trajectory.mask_t)
  if not values.size or not trained.size:
    return NO_STEPS
  if not np.isfinite(values).all():
    raise RewardError(f'rewards of steps must be finite, got {values.tolist()} for {name}.')
  if trajectory.step_ends:
    place = np.searchsorted(trained, np.asarray(trajectory.step_ends)) - 1
  else:
    place = np.searchsorted(turn[trained], np.arange(count), side='right') - 1
  if place.size != values.size or (np.diff(place) < 0).any():
    raise DataError(
      f'{name} has {values.size} rewards of steps for {place.size} steps that end at {place.tolist()}. '
      'Give step_ends in order, one for each reward, or one reward a turn.'
    )
  place = np.maximum(place, 0)
  place[-1] = trained.size - 1
  return Steps(place, values)


def turn_of_tokens(trajectory: Trajectory) -> np.ndarray:
  """Turn of every token, int32 [T]; a token between turns has that of the one before."""
  sampled = np.asarray(trajectory.source_t) == Source.POLICY
  starts = sampled & ~np.concatenate([[False], sampled[:-1]])
  return np.maximum(np.cumsum(starts) - 1, 0).astype(np.int32)


def with_rest(steps: Steps, reward: float, length: int) -> Steps:
  """All of a trajectory's reward as steps: what its steps leave of it is due with the last one.

  Without process rewards the trajectory is one step.
  """
  if not steps.place.size:
    return Steps(np.arange(length)[-1:], np.full(min(length, 1), reward))
  return Steps(steps.place, np.append(steps.reward[:-1], reward - steps.reward[:-1].sum()))


def are_equal(rewards: np.ndarray) -> bool:
  """Whether rewards, of which some are differences of others, are equal but for rounding."""
  return bool(np.ptp(rewards) <= 1e-12 * np.abs(rewards).max()) if rewards.size else True


def spread(steps: Steps, length: int) -> np.ndarray:
  """Reward of every trained token, float64 [n]: that of a step at its last token, else 0."""
  out = np.zeros(length)
  np.add.at(out, steps.place, steps.reward)
  return out
