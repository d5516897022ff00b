"""Parts of a batch of groups: the trained tokens of what is given for all, and groups without trajectories."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlax_stack.types import Group


def of_trained_tokens(
  groups: Sequence[Group], scores: Sequence[Sequence[np.ndarray]]
) -> tuple[np.ndarray, ...]:
  """The scores of trained tokens alone, one array per trajectory of the batch."""
  return tuple(
    score[trajectory.mask_t]
    for group, of_group in zip(groups, scores, strict=True)
    for trajectory, score in zip(group.trajectories, of_group, strict=True)
  )


def without(group: Group, keep: np.ndarray) -> Group:
  """The group with nothing to train on in the trajectories that are not kept."""
  if keep.all():
    return group
  trajectories = tuple(
    t if kept else dataclasses.replace(t, mask_t=np.zeros_like(t.mask_t))
    for t, kept in zip(group.trajectories, keep, strict=True)
  )
  return dataclasses.replace(group, trajectories=trajectories)
