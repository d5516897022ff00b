"""Advantages that differ within a trajectory: where its group branches.

Not for turns and agents (`roles.py`) or process rewards (`process.py`). Invariant: the samples of a
group share a prefix exactly as far as their tokens agree, whoever wrote them.
"""

import math
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch, TokenValues, compared_groups


def prefix_tree(
  batch: RewardBatch,
  *,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> TokenValues:
  """The advantage of GRPO plus, at tokens where the group branches, what the branch is worth (TEMPO).

  Aᵢₜ = (Rᵢ − μ_g + V(sₜ₊₁) − V(sₜ)) / (s_g + ε)

  sₜ the tokens before t, V the mean reward of the group's samples that begin with them: the
  difference is 0 wherever all of these go on alike. Divided by: the group's own standard deviation.
  Gradient flows through: nothing (numpy).
  See "Exploiting Tree Structure for Credit Assignment in RL Training of LLMs", Tran et al.
  (https://arxiv.org/abs/2509.18314).

  Args:
    batch: ragged groups of at least 2, with trajectories.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64, one array per trajectory.
  """
  out = [np.zeros(n) for n in batch.length]
  for member in compared_groups(batch):
    rewards = batch.reward[member]
    if (rewards == rewards[0]).all():
      continue
    scale = rewards.std(ddof=ddof) + eps
    for index, steps in zip(member, _branch_steps(batch, member), strict=True):
      trained = np.asarray(batch.trajectories[index].mask_t)
      out[index] = (batch.reward[index] - rewards.mean() + steps[trained]) / scale
  return tuple(out)


def tree_nodes(batch: RewardBatch) -> TokenValues:
  """What a node of the group's prefix tree is worth beside the root and beside the node before it (TreeRL).

  Aₜ = (2 V(n) − V(root) − V(parent(n))) / √|n|,  n the node of token t, V the mean reward of the samples through it

  A node is a run of tokens that the same samples go through, |n| of them. Divided by: √|n|, because a token that k
  samples share counts k times. Gradient flows through: nothing (numpy).
  See "TreeRL: LLM Reinforcement Learning with On-Policy Tree Search", Hou et al.
  (https://arxiv.org/abs/2506.11902).

  Args:
    batch: ragged groups of at least 2, with trajectories.

  Returns: float64, one array per trajectory.
  """
  out = [np.zeros(n) for n in batch.length]
  for member in compared_groups(batch):
    rewards = batch.reward[member]
    if (rewards == rewards[0]).all():
      continue
    root = rewards.mean()
    values = [np.zeros(len(batch.trajectories[index].tokens)) for index in member]
    for node in _nodes(batch, member):
      worth, before = node.rewards.mean(), node.before.mean()
      for i in node.members:
        values[i][node.start :] = (2 * worth - root - before) / math.sqrt(len(node.members))
    for index, value in zip(member, values, strict=True):
      out[index] = value[np.asarray(batch.trajectories[index].mask_t)]
  return tuple(out)


class _Node(NamedTuple):
  """Samples that go on alike from `start`, where others that agreed with them until then do not."""

  start: int
  members: list[int]  # places in the group
  rewards: np.ndarray  # of them
  before: np.ndarray  # of all that agreed until then


def _nodes(batch: RewardBatch, member: np.ndarray) -> Iterator[_Node]:
  """The nodes of a group's prefix tree, each after the one it leaves; prompts agree."""
  tokens = [np.asarray(batch.trajectories[index].tokens) for index in member]
  rewards = batch.reward[member]
  pending = [(list(range(len(member))), 0)]  # who agrees so far, and how far
  while pending:
    agreeing, depth = pending.pop()
    depth += _agreement([tokens[i][depth:] for i in agreeing])
    branches: dict[int, list[int]] = {}
    for i in agreeing:
      if depth < len(tokens[i]):
        branches.setdefault(int(tokens[i][depth]), []).append(i)
    for branch in branches.values():
      yield _Node(depth, branch, rewards[branch], rewards[agreeing])
      if len(branch) > 1:
        pending.append((branch, depth + 1))


def _branch_steps(batch: RewardBatch, member: np.ndarray) -> list[np.ndarray]:
  """V(after) − V(before) at every token of the group's trajectories, prompts included."""
  steps = [np.zeros(len(batch.trajectories[index].tokens)) for index in member]
  for node in _nodes(batch, member):
    for i in node.members:
      steps[i][node.start] = node.rewards.mean() - node.before.mean()
  return steps


def _agreement(tokens: list[np.ndarray]) -> int:
  """How many tokens all of them begin with."""
  shortest = min(len(t) for t in tokens)
  together = np.stack([t[:shortest] for t in tokens])
  differs = (together != together[0]).any(axis=0)
  return int(differs.argmax()) if differs.any() else shortest


TABLE = {
  'prefix_tree': Box(
    prefix_tree, formula="A = (R − μ_g + V(s') − V(s))/(s_g + {eps:g})", tags=frozenset({'group'})
  ),
  'tree_nodes': Box(
    tree_nodes, formula='A = (2 V(n) − V(root) − V(parent))/√|n|', tags=frozenset({'group'})
  ),
}
