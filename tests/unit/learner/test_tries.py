"""Tries of sequences against what each of their tokens should see."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from rlax_stack.learner.tries import lay_out

_SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=7)


@hypothesis.given(_SEQUENCES)
def test_every_token_sees_what_came_before_it_and_prefixes_stand_once(sequences):
  layout = lay_out([np.array(s, np.int32) for s in sequences])
  size = len(layout.tokens)
  prefixes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
  assert size == len(prefixes) == len(layout.depth) == len(layout.subtree_end)
  for sequence, places in zip(sequences, layout.places, strict=True):
    np.testing.assert_array_equal(layout.tokens[places], sequence)
    np.testing.assert_array_equal(layout.depth[places], range(len(sequence)))
    for i, place in enumerate(places):
      seen = [j for j in range(place + 1) if place < layout.subtree_end[j]]
      np.testing.assert_array_equal(seen, places[: i + 1])


def test_sequences_apart_follow_one_another():
  layout = lay_out([np.array([5, 6]), np.array([4]), np.array([], np.int32), np.array([6, 5])])
  np.testing.assert_array_equal(layout.tokens, [5, 6, 4, 6, 5])
  np.testing.assert_array_equal(layout.subtree_end, [2, 2, 3, 5, 5])
  assert [p.tolist() for p in layout.places] == [[0, 1], [2], [], [3, 4]]
