import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlax_stack.pallas_kernels import block_tables
from rlax_stack.pallas_kernels.block_tables import EMPTY, FULL, PARTIAL

_kinds = jax.jit(block_tables.block_kinds, static_argnames=('block_q', 'block_kv', 'window'))


def _dense(positions, ends, window):
  i = np.arange(len(ends))
  seen = (i[None] <= i[:, None]) & (i[:, None] < ends[None])
  if window is not None:
    seen &= positions[:, None] - positions[None] < window
  return seen


def test_kinds_of_a_shared_prompt():
  # A prompt of two blocks, then two suffixes of one block each, then a block that nobody uses.
  ends = np.repeat([16, 16, 12, 16, 0], 4).astype(np.int32)
  positions = np.concatenate([np.arange(12), 8 + np.arange(4), np.zeros(4)]).astype(np.int32)
  kinds = _kinds(jnp.asarray(positions)[None], jnp.asarray(ends)[None], block_q=4, block_kv=4)
  want = [
    [PARTIAL, EMPTY, EMPTY, EMPTY, EMPTY],
    [FULL, PARTIAL, EMPTY, EMPTY, EMPTY],
    [FULL, FULL, PARTIAL, EMPTY, EMPTY],
    [FULL, FULL, EMPTY, PARTIAL, EMPTY],
    [EMPTY, EMPTY, EMPTY, EMPTY, EMPTY],
  ]
  np.testing.assert_array_equal(kinds[0], want)
  seen = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 3)]
  for by_key in (False, True):
    for blocks, capacity in ((None, 25), ((4, 4), 15)):
      listed = block_tables.block_list(kinds, by_key=by_key, blocks=blocks)
      assert listed.capacity == capacity
      assert listed.count.tolist() == [9]
      pairs = listed.packed[0, :9]
      q_block, kv_block = block_tables.q_block_of(pairs), block_tables.kv_block_of(pairs)
      got = list(zip(q_block.tolist(), kv_block.tolist(), strict=True))
      assert got == sorted(seen, key=lambda pair: pair[:: -1 if by_key else 1])
      np.testing.assert_array_equal(block_tables.kind_of(pairs), kinds[0, q_block, kv_block])


def test_more_blocks_than_a_list_can_name_are_refused():
  kinds = jnp.zeros((1, 1, block_tables.MAX_BLOCKS + 1), jnp.int8)
  with pytest.raises(ValueError, match='16385 blocks, more than 16384'):
    block_tables.block_list(kinds)


@pytest.mark.parametrize(('prompt', 'suffixes'), [(64, [16] * 8), (40, [24, 7, 33]), (3, [5, 90])])
def test_visits_are_those_needed_and_no_more(prompt, suffixes):
  """Every listed pair of a packed group holds something that is seen."""
  tokens = -(-(prompt + sum(suffixes)) // 8) * 8
  ends, start = np.zeros(tokens, np.int32), prompt
  ends[:prompt] = prompt + sum(suffixes)
  for length in suffixes:
    ends[start : start + length] = start + length
    start += length
  kinds = _kinds(jnp.zeros((1, tokens), jnp.int32), jnp.asarray(ends)[None], block_q=8, block_kv=8)
  tiles = _dense(None, ends, None).reshape(tokens // 8, 8, tokens // 8, 8).any((1, 3))
  assert block_tables.block_list(kinds).count.tolist() == [tiles.sum()]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_kinds_never_lie(data):
  tokens, block_q, block_kv = 24, data.draw(st.sampled_from([4, 8])), 4
  window = data.draw(st.sampled_from([None, 1, 6]))
  extra = data.draw(st.lists(st.integers(-1, 12), min_size=tokens, max_size=tokens))
  ends = np.array([j + e if e > 0 else 0 for j, e in enumerate(extra)], np.int32)
  positions = np.array(data.draw(st.permutations(range(tokens))), np.int32)
  kinds = _kinds(
    jnp.asarray(positions)[None],
    jnp.asarray(ends)[None],
    block_q=block_q,
    block_kv=block_kv,
    window=window,
  )[0]
  lives = ends > np.arange(tokens)
  seen = _dense(positions, ends, window) & lives[:, None]
  tiles = seen.reshape(tokens // block_q, block_q, tokens // block_kv, block_kv)
  some, every = tiles.any((1, 3)), tiles.all((1, 3))
  kinds = np.asarray(kinds)
  assert not some[kinds == EMPTY].any()
  # A query that is left out has no output, so a FULL pair may hold it: only live queries count.
  every = (tiles | ~lives.reshape(-1, block_q)[:, :, None, None]).all((1, 3))
  assert every[kinds == FULL].all()


def test_wide_blocks_join_what_is_seen_whole_and_leave_the_rest():
  kinds = jnp.asarray(
    [
      [
        [PARTIAL, EMPTY, EMPTY, EMPTY, EMPTY],
        [FULL, PARTIAL, EMPTY, EMPTY, EMPTY],
        [FULL, FULL, PARTIAL, EMPTY, EMPTY],
        [FULL, FULL, EMPTY, PARTIAL, EMPTY],
        [FULL, FULL, FULL, PARTIAL, PARTIAL],
      ]
    ],
    jnp.int8,
  )
  wide, left = block_tables.split_wide(kinds, 2)
  np.testing.assert_array_equal(
    wide[0], [[EMPTY, EMPTY], [PARTIAL, EMPTY], [FULL, EMPTY], [FULL, EMPTY], [FULL, PARTIAL]]
  )
  np.testing.assert_array_equal(
    left[0],
    [
      [PARTIAL, EMPTY, EMPTY, EMPTY, EMPTY],
      [EMPTY, EMPTY, EMPTY, EMPTY, EMPTY],
      [EMPTY, EMPTY, PARTIAL, EMPTY, EMPTY],
      [EMPTY, EMPTY, EMPTY, PARTIAL, EMPTY],
      [EMPTY, EMPTY, EMPTY, EMPTY, PARTIAL],
    ],
  )


def test_a_row_shorter_than_a_wide_block_has_none():
  kinds = jnp.full((2, 3, 3), FULL, jnp.int8)
  wide, left = block_tables.split_wide(kinds, 4)
  assert wide.shape == (2, 3, 0)
  np.testing.assert_array_equal(left, kinds)
