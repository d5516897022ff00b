"""Checks what a worker sends back and makes a group of it. Pure: no locks, no accounts."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlax_stack.errors import FleetError
from rlax_stack.types import FinishReason, Group, Prompt, Source, Trajectory


def check_delivery(group_id: int, num_samples: int, trajectories: Sequence[Trajectory]) -> None:
  """Raises FleetError unless these are all `num_samples` scored samples of the group, each once.

  Those of one prompt, the group's or another role's, must start with the same tokens.
  A part of a group is refused: the samples that finish first are the short ones. A worker that cannot finish a
  group gives the lease back (`Coordinator.fail`).
  """
  foreign = sorted({t.group_id for t in trajectories} - {group_id})
  if foreign:
    raise FleetError(
      f'Trajectories of groups {foreign} were delivered under the lease of group {group_id}.'
    )
  indices = sorted(t.sample_index for t in trajectories)
  if indices != list(range(num_samples)):
    raise FleetError(
      f'Group {group_id} needs samples 0..{num_samples - 1} once each, got {indices}. Deliver it whole.'
    )
  unscored = [t.sample_index for t in trajectories if t.reward is None]
  if unscored:
    raise FleetError(
      f'Samples {unscored} of group {group_id} have no reward. Score them before delivery.'
    )
  for alike in _by_prompt(trajectories):
    first = prompt_tokens_of(alike[0])
    if any(not np.array_equal(first, prompt_tokens_of(t)) for t in alike[1:]):
      raise FleetError(f'The samples of group {group_id} do not start with the same prompt tokens.')


def prompt_tokens_of(trajectory: Trajectory) -> np.ndarray:
  """The leading run of PROMPT tokens, int32 [P]."""
  others = np.flatnonzero(trajectory.source_t != Source.PROMPT)
  return trajectory.tokens[: others[0] if others.size else len(trajectory.tokens)]


def reward_failure(trajectory: Trajectory) -> str | None:
  """Why the verdict cannot be trained on, or None; a reward that is not finite is a failed verdict."""
  reward = trajectory.reward
  if reward is None:
    return 'not scored'
  if reward.failure is not None:
    return reward.failure
  if reward.value is None or not math.isfinite(reward.value):
    return f'reward is {reward.value}'
  return None


def is_usable(trajectory: Trajectory) -> bool:
  """Whether the sample can be trained on: scored, not aborted, with at least one sampled token."""
  aborted = trajectory.finish_reason == FinishReason.ABORT
  return reward_failure(trajectory) is None and not aborted and trajectory.num_sampled > 0


def make_group(
  group_id: int,
  prompt: Prompt,
  trajectories: Sequence[Trajectory],
  min_sizes: Mapping[str, int],
  greedy: Trajectory | None = None,
) -> Group | None:
  """A group of the usable ones of all samples, in order of their index, with the groups of other roles in `others`.

  Args:
    group_id: of the lease.
    prompt: of the lease.
    trajectories: all of them, without the greedy one.
    min_sizes: by role, the usable samples that a group needs; a smaller group of another role is left out.
    greedy: drawn beside them.

  Returns: None where the group itself, or every group of some role, is too small.
  """
  found: dict[str, list[Group]] = {t.role: [] for t in trajectories}
  for alike in _by_prompt(trajectories):
    role, usable = alike[0].role, tuple(filter(is_usable, alike))
    if len(usable) >= max(1, min_sizes[role]):
      asked, tokens = alike[0].asked or prompt, prompt_tokens_of(usable[0])
      found[role].append(
        Group(group_id=group_id, prompt=asked, prompt_tokens=tokens, trajectories=usable, role=role)
      )
  if not all(found.values()):
    return None
  (own,) = found.pop('')
  return dataclasses.replace(own, greedy=greedy, others=tuple(itertools.chain(*found.values())))


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
  """Those of all roles."""
  return [t for visit in groups for group in visit.of_all_roles for t in group.trajectories]


def _by_prompt(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
  """Samples of one role and prompt together, in order of their index."""
  alike: dict[tuple[str, str], list[Trajectory]] = {}
  for trajectory in sorted(trajectories, key=lambda t: t.sample_index):
    key = trajectory.role, '' if trajectory.asked is None else trajectory.asked.prompt_id
    alike.setdefault(key, []).append(trajectory)
  return list(alike.values())
