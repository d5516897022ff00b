import jax
import jax.numpy as jnp
import numpy as np
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
  pairs = block_tables.pair_list(kinds)
  assert pairs.row.shape == (25,)
  assert int(pairs.count) == 9
  got = list(zip(pairs.q_block[:9].tolist(), pairs.kv_block[:9].tolist(), strict=True))
  assert got == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 3)]


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
