"""A token counts once, in however many rows it stands."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.learner import packing
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.place_weights import PlacedTrie, place_weights
from rlax_stack.learner.tries import lay_out


def _tokens_of(groups):
  """Different tokens of each group that have a place: prompts, and what trajectories have before their last token."""
  count = 0
  for group in groups:
    prefixes = {
      tuple(t.tokens[: i + 1].tolist())
      for t in group.trajectories
      for i in range(len(t.tokens) - 1)
    }
    count += len(prefixes)
  return count


def _shared(groups):
  """The second trajectory of every group begins as the first one."""

  def one(group):
    first, second, *rest = group.trajectories
    tokens = second.tokens.copy()
    start = len(group.prompt_tokens)
    same = min(2, len(tokens) - start, len(first.tokens) - start)
    tokens[start : start + same] = first.tokens[start : start + same]
    second = dataclasses.replace(second, tokens=tokens)
    return dataclasses.replace(group, trajectories=(first, second, *rest))

  return [one(group) for group in groups]


@pytest.mark.parametrize('length', [16, 24, 64])
@pytest.mark.parametrize('pack', [packing.pack_groups, packing.pack_separate])
def test_weights_add_up_to_the_different_tokens(pack, length, make_groups):
  groups = _shared(make_groups())
  advantages = [np.zeros(len(group.trajectories)) for group in groups]
  batch = pack(
    groups, advantages, row_shapes=[RowShape(length, 48)], rows_multiple=4, weigh_places=True
  )
  weight = batch.place_weight
  assert weight.shape == batch.tokens.shape and weight.dtype == np.float32
  assert weight.sum() == pytest.approx(_tokens_of(groups), abs=1e-4)
  assert (weight > 0).sum() == packing.packing_stats(batch)['row_tokens']
  padded = packing.pad_rows(batch, len(weight) + 3).place_weight
  assert not padded[-3:].any()
  np.testing.assert_array_equal(padded[:-3], weight)


def test_without_asking_there_are_none(make_groups):
  groups = make_groups()
  advantages = [np.zeros(len(group.trajectories)) for group in groups]
  assert packing.pack_groups(groups, advantages, row_shapes=[RowShape(64, 48)]).place_weight is None


def test_weights_by_hand():
  contexts = [np.array(t, np.int32) for t in ([5, 6, 7], [5, 8], [5, 6, 9])]
  prompt = np.array([1, 2], np.int32)
  placed = [
    PlacedTrie(0, 0, 1, prompt, contexts[:2], lay_out(contexts[:2])),
    PlacedTrie(0, 1, 0, prompt, contexts[2:], lay_out(contexts[2:])),
    PlacedTrie(1, 1, 5, prompt, contexts[:1], lay_out(contexts[:1])),
  ]
  got = place_weights((2, 11), placed)
  half = 0.5
  np.testing.assert_array_equal(
    got,
    [
      [0, half, half, half, half, 1, 1, 0, 0, 0, 0],
      [half, half, half, half, 1, 1, 1, 1, 1, 1, 0],
    ],
  )
