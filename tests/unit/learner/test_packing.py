"""Packing: every trained token recoverable, visibility as in separate sequences, errors.

Determinism.
"""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rlax_stack.errors import ConfigError, DataError
from rlax_stack.learner import packing
from rlax_stack.learner.branches import NOWHERE, PROMPT_END, make_branch
from rlax_stack.learner.packing import RowShape
from rlax_stack.models.shapes import SHAPES
from rlax_stack.types import FinishReason, Group, Prompt, Source, Trajectory


def make_group(group_id, prompt, completions, masks=None):
  """A group whose behaviour log-probs and versions are functions of the token's place."""
  trajectories = []
  for i, completion in enumerate(completions):
    tokens = np.concatenate([prompt, completion]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    if masks is not None:
      mask[len(prompt) :] = masks[i]
    trajectories.append(
      Trajectory(
        group_id=group_id,
        sample_index=i,
        prompt_id=f'p{group_id}',
        tokens=tokens,
        source_t=np.where(mask, Source.POLICY, Source.PROMPT).astype(np.int8),
        mask_t=mask,
        behaviour_log_probs_t=-np.arange(len(tokens), dtype=np.float32) - i,
        raw_log_probs_t=np.zeros(len(tokens), np.float32),
        version_t=np.full(len(tokens), group_id, np.int32),
        finish_reason=FinishReason.STOP,
      )
    )
  task = Prompt(prompt_id=f'p{group_id}', messages=(), answer='')
  return Group(
    group_id=group_id,
    prompt=task,
    prompt_tokens=np.asarray(prompt, np.int32),
    trajectories=tuple(trajectories),
  )


@st.composite
def _batches(draw):
  groups, token = [], 1
  for g in range(draw(st.integers(1, 4))):
    prompt_length = draw(st.integers(1, 6))
    prompt = np.arange(token, token + prompt_length)
    token += prompt_length
    completions, masks = [], []
    for _ in range(draw(st.integers(1, 5))):
      length = draw(st.integers(1, 7))
      fresh = np.arange(token, token + length)
      # Some go on like one before.
      shared = draw(st.integers(0, length)) if completions else 0
      other = completions[draw(st.integers(0, len(completions) - 1))] if completions else fresh
      completions.append(np.concatenate([other[:shared], fresh[min(shared, len(other)) :]]))
      masks.append(np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length))))
      token += length
    groups.append(make_group(g, prompt, completions, masks))
  hypothesis.assume(any(t.mask_t.any() for g in groups for t in g.trajectories))
  return groups


def _advantages(groups):
  return [np.arange(len(g.trajectories), dtype=np.float32) + 10 * g.group_id for g in groups]


def _seen(batch, row, index):
  """Tokens that the token at `index` sees, itself included, in order, and their positions."""
  i = int(index)
  visible = (np.arange(i + 1) <= i) & (i < batch.subtree_end[row, : i + 1])
  return batch.tokens[row, : i + 1][visible], batch.positions[row, : i + 1][visible]


def _check(groups, batch):
  """Every trained token is the target of one triple.

  Whose source sees exactly what came before it.
  """
  trajectories = [t for g in groups for t in g.trajectories]
  group_of = [g for g, group in enumerate(groups) for _ in group.trajectories]
  advantages = np.concatenate(_advantages(groups))
  want = {
    (i, int(t))
    for i, trajectory in enumerate(trajectories)
    for t in np.flatnonzero(trajectory.mask_t)
  }
  got = set()
  for row, triple in zip(*np.nonzero(batch.mask_t), strict=True):
    index = int(batch.trajectory_t[row, triple])
    tokens, positions = _seen(batch, row, batch.source_index_t[row, triple])
    place = len(tokens)
    trajectory = trajectories[index]
    np.testing.assert_array_equal(tokens, trajectory.tokens[:place])
    np.testing.assert_array_equal(positions, np.arange(place))
    assert batch.target_t[row, triple] == trajectory.tokens[place]
    assert batch.group_t[row, triple] == group_of[index]
    assert batch.adv_t[row, triple] == advantages[index]
    assert batch.behaviour_log_probs_t[row, triple] == trajectory.behaviour_log_probs_t[place]
    assert batch.version_t[row, triple] == trajectory.version_t[place]
    assert (index, place) not in got
    got.add((index, place))
  assert got == want


@hypothesis.given(_batches(), st.booleans(), st.integers(1, 3))
def test_packed_rows_say_what_the_trajectories_say(groups, separate, multiple):
  shapes = [RowShape(16, 12), RowShape(24, 18)]
  pack = packing.pack_separate if separate else packing.pack_groups
  batch = pack(groups, _advantages(groups), row_shapes=shapes, rows_multiple=multiple)
  assert batch.tokens.shape[0] % multiple == 0
  assert (batch.tokens.shape[1], batch.target_t.shape[1]) in shapes
  _check(groups, batch)
  # No token has an empty softmax, and what is masked names no trajectory.
  length = batch.tokens.shape[1]
  assert (batch.subtree_end > np.arange(length)).all() and (batch.subtree_end <= length).all()
  assert (batch.trajectory_t[~batch.mask_t] == -1).all()


def test_prompt_once_and_layout_by_hand():
  group = make_group(0, [1, 2], [[3, 4, 5], [6], [7, 8]])
  batch = packing.pack_groups(
    [group], [np.zeros(3, np.float32)], row_shapes=[RowShape(8, 6)], rows_multiple=1
  )
  # The last token of each completion is a target only.
  np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4, 7, 0, 0, 0]])
  np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 2, 0, 0, 0]])
  np.testing.assert_array_equal(batch.subtree_end, [[5, 5, 4, 4, 5, 6, 7, 8]])
  np.testing.assert_array_equal(batch.source_index_t, [[1, 2, 3, 1, 1, 4]])
  np.testing.assert_array_equal(batch.target_t, [[3, 4, 5, 6, 7, 8]])
  np.testing.assert_array_equal(batch.trajectory_t, [[0, 0, 0, 1, 2, 2]])
  assert packing.packing_stats(batch) == {
    'row_tokens': 5,
    'targets': 6,
    'row_places': 8,
    'target_places': 6,
  }


@pytest.mark.parametrize('window', [None, 3])
def test_pairs_that_see_each_other_are_counted(window):
  groups = [
    make_group(g, range(1, g + 3), [np.full(n, 9), np.full(3, 8)]) for g, n in ((0, 2), (2, 5))
  ]
  batch = packing.pack_groups(groups, _advantages(groups), row_shapes=[RowShape(24, 16)])
  in_use = batch.tokens > 0
  want = 0
  for row in range(len(batch.tokens)):
    for i in range(24):
      for j in range(i + 1):
        near = window is None or batch.positions[row, i] - batch.positions[row, j] < window
        want += near and i < batch.subtree_end[row, j] and in_use[row, i]
  assert packing.seen_pairs(batch, window) == want > 0
  model = dataclasses.replace(SHAPES['smollm2_135m'], num_layers=4, sliding_window=window)
  whole = packing.seen_pairs(batch)
  mixed = dataclasses.replace(model, global_layers=(1,)) if window else model
  mean = 0.25 * whole + 0.75 * want if window else whole
  assert packing.pairs_per_layer(batch, mixed) == mean


def test_several_groups_share_a_row_largest_first():
  groups = [make_group(g, [g + 1], [np.full(n, 9), np.full(n, 8)]) for g, n in enumerate([2, 5, 3])]
  batch = packing.pack_groups(groups, _advantages(groups), row_shapes=[RowShape(12, 16)])
  assert batch.tokens.shape == (2, 12)
  assert batch.group_t[0, 0] == 1 and set(batch.group_t[0]) == {1, 0, -1}
  assert set(batch.group_t[1]) == {2, -1}


def test_large_group_is_split_with_its_prompt():
  group = make_group(0, [1, 2, 3], [np.arange(i, i + 5) for i in range(10, 60, 10)])
  batch = packing.pack_groups([group], _advantages([group]), row_shapes=[RowShape(11, 16)])
  assert batch.tokens.shape[0] == 3
  assert (batch.tokens[:, :3] == [1, 2, 3]).all()
  _check([group], batch)


def test_smallest_bucket_that_holds_every_group():
  shapes = [RowShape(64, 64), RowShape(8, 8), RowShape(32, 32)]
  small, large = make_group(0, [1], [[2, 3]] * 2), make_group(1, [1], [np.arange(2, 20)] * 2)
  assert packing.pack_groups([small], [[0, 0]], row_shapes=shapes).tokens.shape[1] == 8
  assert packing.pack_groups([small, large], [[0, 0]] * 2, row_shapes=shapes).tokens.shape[1] == 64


def test_same_input_same_rows():
  groups = [make_group(g, np.arange(1, 4), [np.arange(4, 9)] * 3) for g in range(6)]
  first, second = (
    packing.pack_groups(groups, _advantages(groups), row_shapes=[RowShape(40, 40)])
    for _ in range(2)
  )
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a, b)


def test_pad_rows():
  group = make_group(0, [1], [[2, 3]] * 2)
  batch = packing.pack_groups([group], _advantages([group]), row_shapes=[RowShape(8, 8)])
  padded = packing.pad_rows(batch, 3)
  assert padded.tokens.shape == (3, 8) and not padded.mask_t[1:].any()
  np.testing.assert_array_equal(padded.subtree_end[2], np.arange(1, 9))
  with pytest.raises(ValueError, match='more than num_rows=0'):
    packing.pad_rows(batch, 0)


def test_trajectories_without_trained_tokens_are_left_out():
  group = make_group(0, [1], [[2, 3], [4, 5]], masks=[np.zeros(2, bool), np.ones(2, bool)])
  batch = packing.pack_groups([group], _advantages([group]), row_shapes=[RowShape(8, 8)])
  assert set(batch.trajectory_t[batch.mask_t]) == {1}
  empty = make_group(0, [1], [[2, 3]], masks=[np.zeros(2, bool)])
  with pytest.raises(DataError, match='every mask_t is empty'):
    packing.pack_groups([empty], [[0.0]], row_shapes=[RowShape(8, 8)])


def test_bad_input_is_refused():
  group = make_group(0, [1, 2], [np.arange(3, 30)])
  shapes = [RowShape(16, 16)]
  with pytest.raises(ConfigError, match='28 row tokens and 27 targets.*16 and 16.*row_length'):
    packing.pack_groups([group], [[0.0]], row_shapes=shapes)
  with pytest.raises(DataError, match='1 trajectories and 2 advantages'):
    packing.pack_groups([group], [[0.0, 1.0]], row_shapes=shapes)
  small = make_group(0, [1, 2], [[3]])
  small.trajectories[0].mask_t[:] = True
  with pytest.raises(DataError, match='trains on token 0 of its prompt'):
    packing.pack_groups([small], [[0.0]], row_shapes=shapes)
  small.trajectories[0].tokens[0] = 9
  with pytest.raises(DataError, match='0/0 does not start with the 2 tokens'):
    packing.pack_groups([small], [[0.0]], row_shapes=shapes)


def test_what_completions_share_stands_once():
  group = make_group(0, [1, 2], [[3, 4, 5, 6], [7, 8], [3, 4, 9, 9], [3, 4, 5, 6]])
  batch = packing.pack_groups(
    [group], [np.arange(4.0)], row_shapes=[RowShape(9, 14)], rows_multiple=1
  )
  # 3 4 of three samples, 5 of two of them, 9 of one; then 7. Last tokens are targets only.
  np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4, 5, 9, 7, 0, 0]])
  np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 4, 2, 0, 0]])
  np.testing.assert_array_equal(batch.subtree_end, [[7, 7, 6, 6, 5, 6, 7, 8, 9]])
  # A token that k samples share is k targets, each with its own sample's advantage.
  np.testing.assert_array_equal(batch.target_t, [[3, 4, 5, 6, 7, 8, 3, 4, 9, 9, 3, 4, 5, 6]])
  np.testing.assert_array_equal(batch.source_index_t, [[1, 2, 3, 4, 1, 6, 1, 2, 3, 5, 1, 2, 3, 4]])
  np.testing.assert_array_equal(batch.adv_t, [[0] * 4 + [1] * 2 + [2] * 4 + [3] * 4])


def test_contexts_are_children_of_the_prompt():
  """Two contexts, the second of which repeats tokens 4 and 5; then one that repeats nothing."""
  group = make_group(
    0, [1, 2], [[3, 4, 5, 4, 5, 6, 7, 8, 9], [6]], [[1, 1, 1, 0, 0, 1, 1, 1, 1], [1]]
  )
  cut = dataclasses.replace(group.trajectories[0], context_starts=(5, 9))
  group = dataclasses.replace(group, trajectories=(cut, group.trajectories[1]))
  batch = packing.pack_groups(
    [group], [np.zeros(2, np.float32)], row_shapes=[RowShape(12, 9)], rows_multiple=1
  )
  #                                          3  4  5 | 4  5  6  7 | 8
  np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 0, 0]])
  np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 2, 3, 4, 5, 2, 0, 0]])
  np.testing.assert_array_equal(batch.subtree_end, [[10, 10, 5, 5, 5, 9, 9, 9, 9, 10, 11, 12]])
  np.testing.assert_array_equal(batch.target_t[0, :8], [3, 4, 5, 6, 7, 8, 9, 6])
  np.testing.assert_array_equal(batch.source_index_t[0, :8], [1, 2, 3, 6, 7, 1, 9, 1])
  # The state after a token is where the next one is predicted, in its own context.
  np.testing.assert_array_equal(batch.next_index_t[0, :8], [2, 3, 6, 7, 1, 9, -1, -1])
  np.testing.assert_array_equal(batch.trajectory_t[0], [0] * 7 + [1, -1])


@pytest.mark.parametrize('starts', [(2,), (5, 5), (7, 6), (12,)])
def test_contexts_outside_a_trajectory_are_refused(starts):
  group = make_group(3, [1, 2], [[3, 4, 5, 6, 7, 8]])
  wrong = dataclasses.replace(group.trajectories[0], context_starts=starts)
  group = dataclasses.replace(group, trajectories=(wrong,))
  with pytest.raises(DataError, match=r'trajectory 3/0 has contexts that start at .* end at 8'):
    packing.pack_groups([group], [np.zeros(1)], row_shapes=[RowShape(16, 16)])


def test_a_branch_is_told_by_its_own_trajectory(make_groups):
  (group, *_) = make_groups()
  trajectory = group.trajectories[0]
  branch = make_branch(group, trajectory, 7, 0.5, 1.0, False)
  trained = np.flatnonzero(trajectory.mask_t)
  after = trajectory.tokens[len(group.prompt_tokens) : trained[-1]]
  np.testing.assert_array_equal(branch.tokens, after)
  np.testing.assert_array_equal(branch.target, trajectory.tokens[trained])
  assert branch.trajectory == 7 and branch.next[-1] == NOWHERE
  assert (branch.source == PROMPT_END).sum() == (trained[0] == len(group.prompt_tokens))
  untrained = dataclasses.replace(trajectory, mask_t=np.zeros_like(trajectory.mask_t))
  assert make_branch(group, untrained, 7, 0.5, 1.0, False) is None
