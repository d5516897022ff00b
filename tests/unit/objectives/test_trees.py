"""Advantages of trees and of guided groups against plain loops and numbers by hand.

A name in a test that is also a recipe's holds the boxes of that recipe.
"""

import dataclasses
import math

import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.objectives.advantages.branches import tree_nodes
from rlax_stack.objectives.advantages.group import group_std
from rlax_stack.objectives.advantages.trees import start_std, tree_std, vine
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.objective import resolve
from rlax_stack.types import Branch, Source

_PROMPT = 1  # tokens of the prompt of make_reward_batch


def _close(got, want):
  for some, other in zip(got, want, strict=True):
    np.testing.assert_allclose(some, other, rtol=1e-6, atol=1e-9)


def _with(batch, **columns):
  """The batch with other fields in its trajectories, sample_index counted within the group."""
  index = [int((batch.group[:i] == g).sum()) for i, g in enumerate(batch.group)]
  columns = {'sample_index': index} | columns
  trajectories = tuple(
    dataclasses.replace(t, **{name: values[i] for name, values in columns.items()})
    for i, t in enumerate(batch.trajectories)
  )
  return dataclasses.replace(batch, trajectories=trajectories)


def test_tree_nodes(make_reward_batch):
  tokens = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 2], [9, 9]]
  rewards = [1.0, 0.0, 0.5, 0.0, 0.0]
  batch = make_reward_batch(rewards, [0] * 5, [len(t) for t in tokens], tokens=tokens)

  def through(prefix):
    return [r for t, r in zip(tokens, rewards, strict=True) if t[: len(prefix)] == prefix]

  want = []
  for sample in tokens:
    row = []
    for i in range(len(sample)):
      node, before = through(sample[: i + 1]), i
      while len(through(sample[:before])) == len(node):
        before -= 1  # the parent is the longest prefix that more samples go through
      parent, root = through(sample[:before]), rewards
      row.append((2 * np.mean(node) - np.mean(root) - np.mean(parent)) / math.sqrt(len(node)))
    want.append(row)
  # The first sample by hand: V is 0.3 at the root, 0.375 after `1`, 0.5 after `3`, 1 after `4`.
  _close([want[0]], [[0.15 / 2, 0.15 / 2, 0.325 / math.sqrt(2), 1.2]])
  _close(tree_nodes(batch), want)
  _close(
    advantages_of(resolve(advantage='tree_nodes'), batch).adv_t, np.float32(0) + _float32(want)
  )
  even = make_reward_batch([0.1] * 5, [0] * 5, [len(t) for t in tokens], tokens=tokens)
  assert all((values == 0).all() for values in tree_nodes(even))


def _float32(rows):
  out = np.empty(len(rows), object)
  out[:] = [np.asarray(row, np.float32) for row in rows]
  return out


def test_tree_std(make_reward_batch):
  rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.5]
  batch = make_reward_batch(rewards, [0] * 5 + [1] * 2)
  branches = [None, None, Branch(0, 0, 2), Branch(1, 1, 3), Branch(0, 2, 3), None, None]
  got = tree_std(_with(batch, branch=branches), ddof=1, eps=1e-6)

  def standard(value, among):
    mean = sum(among) / len(among)
    variance = sum((r - mean) ** 2 for r in among) / (len(among) - 1)
    return (value - mean) / (math.sqrt(variance) + 1e-6)

  trees = [[1.0, 0.0, 0.0], [0.0, 1.0]]  # samples 0, 2, 4 and samples 1, 3
  want = [
    standard(r, rewards[:5]) + standard(r, trees[tree])
    for r, tree in zip(rewards[:5], (0, 1, 0, 1, 0), strict=True)
  ]
  np.testing.assert_allclose(got[:5], want, rtol=1e-12)
  # Independent samples are trees of one: GRPO.
  np.testing.assert_allclose(tree_std(_with(batch)), group_std(batch), rtol=1e-12)


def test_start_std(make_reward_batch):
  rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
  batch = make_reward_batch(
    rewards, [0] * 6, [4] * 6, tokens=[[3, 3, 1, 2]] * 3 + [[3, 4, 1, 2]] * 3
  )
  # Two begin with `3 3`, one with `3 4`, one with `3`; the last two are unguided.
  guided = [2, 2, 1, 2, 0, 0]
  source = [
    np.array([Source.PROMPT] + [Source.GUIDE] * n + [Source.POLICY] * (4 - n)) for n in guided
  ]
  got = start_std(_with(batch, source_t=source), ddof=1, eps=0.0)
  half = 1 / math.sqrt(2)
  np.testing.assert_allclose(got, [half, -half, 0, 0, -half, half], rtol=1e-12)
  np.testing.assert_array_equal(start_std(batch), group_std(batch))


def test_vine(make_reward_batch):
  """Two samples of 4 tokens; rollouts from the first one after 1 and 3 tokens, from the second after 2."""
  rewards = [1.0, 0.0] + [1.0, 0.0, 1.0, 1.0] + [0.0, 0.0, 1.0]
  batch = make_reward_batch(rewards, [0] * 9, [4] * 9)
  branches = [None, None]
  branches += [Branch(0, 0, _PROMPT + 1)] * 2 + [Branch(0, 0, _PROMPT + 3)] * 2
  branches += [Branch(1, 1, _PROMPT + 2)] * 3
  nothing = [t.mask_t if i < 2 else np.zeros(5, bool) for i, t in enumerate(batch.trajectories)]
  batch = dataclasses.replace(
    _with(batch, branch=branches, mask_t=nothing), length=np.array([4, 4] + [0] * 7)
  )
  got = vine(batch)
  # The other sample's reward is the value at the prompt: 0 for the first one, 1 for the second.
  np.testing.assert_allclose(got[0], [0.5 - 0, 1 - 0.5, 1 - 0.5, 1 - 1])
  np.testing.assert_allclose(got[1], [1 / 3 - 1] * 2 + [0 - 1 / 3] * 2)
  assert all(values.size == 0 for values in got[2:])
  found = advantages_of(resolve(advantage='vine'), batch)
  assert found.keep.tolist() == [True, True] + [False] * 7
  # Without rollouts it is the reward beside the others' mean.
  plain = make_reward_batch([1.0, 0.0, 0.5], [0] * 3)
  _close(vine(plain), [[0.75] * 3, [-0.75] * 3, [0.0] * 3])
  alone = dataclasses.replace(plain, length=np.array([3, 0, 0]))
  with pytest.raises(ConfigError, match='vine needs 2 or more samples .* got 1'):
    vine(alone)
