"""Which blocks of the tree-attention mask hold anything, found without ever forming the mask.

A row of T tokens is cut into blocks of query and of key tokens. From the first and last values of a few
integers per block one knows whether a pair of blocks is empty, full or partly visible; the pairs that are
not empty are listed, and the kernels walk that list and nothing else.

Invariant: a pair called EMPTY has no visible element, a pair called FULL has no hidden one. A PARTIAL pair may
turn out to be either; it costs time, never correctness.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2

_FAR = np.int32(2**30)


class PairList(NamedTuple):
  """The block pairs to visit: entries [0, count) of each array, ordered by row, query block, key block."""

  row: jax.Array  # int32 [C]
  q_block: jax.Array  # int32 [C]
  kv_block: jax.Array  # int32 [C]
  count: jax.Array  # int32 scalar, at most C


def _blocked(values: jax.Array, block: int) -> jax.Array:
  rows, tokens = values.shape
  return values.reshape(rows, tokens // block, block)


def block_kinds(
  positions: jax.Array,
  subtree_end: jax.Array,
  *,
  block_q: int,
  block_kv: int,
  window: int | None = None,
) -> jax.Array:
  """Classifies every pair of blocks.

  A token with `subtree_end[j] <= j` is seen by nobody, itself included, and sees nobody: this is how kernels
  mark tokens that they leave out.

  Args:
    positions: int32 [R, T], depth from the root.
    subtree_end: int32 [R, T], index just past the last token that may see token j.
    block_q: tokens in a query block; divides T.
    block_kv: tokens in a key block; divides T.
    window: a query sees keys less than this many positions back; None for no limit.

  Returns:
    int8 [R, T / block_q, T / block_kv] of EMPTY, PARTIAL or FULL.
  """
  tokens = positions.shape[1]
  index = jnp.arange(tokens, dtype=jnp.int32)[None]
  lives = subtree_end > index
  q_first = _blocked(jnp.where(lives, index, _FAR), block_q).min(-1)[:, :, None]
  q_last = _blocked(jnp.where(lives, index, -1), block_q).max(-1)[:, :, None]
  kv_first = jnp.arange(0, tokens, block_kv, dtype=jnp.int32)[None, None]
  end_max = _blocked(jnp.where(lives, subtree_end, 0), block_kv).max(-1)[:, None]
  end_min = _blocked(jnp.where(lives, subtree_end, 0), block_kv).min(-1)[:, None]
  some = (kv_first <= q_last) & (end_max > q_first)
  every = (kv_first + block_kv - 1 <= q_first) & (end_min > q_last)
  if window is not None:
    near, far = jnp.where(lives, positions, _FAR), jnp.where(lives, positions, -_FAR)
    least = _blocked(near, block_q).min(-1)[:, :, None] - _blocked(far, block_kv).max(-1)[:, None]
    most = _blocked(far, block_q).max(-1)[:, :, None] - _blocked(near, block_kv).min(-1)[:, None]
    some, every = some & (least < window), every & (most < window)
  return jnp.where(every & some, FULL, jnp.where(some, PARTIAL, EMPTY)).astype(jnp.int8)


def pair_list(kinds: jax.Array) -> PairList:
  """Compacts the pairs that are not EMPTY; one static capacity, a dynamic count.

  Args:
    kinds: int8 [R, Nq, Nkv] of `block_kinds` or `split_wide`.

  Returns:
    PairList with capacity R Nq Nkv.
  """
  row, q_block, kv_block = np.indices(kinds.shape, dtype=np.int32).reshape(3, -1)
  wanted = kinds.reshape(-1) != EMPTY
  order = jnp.argsort(~wanted, stable=True)
  rows_of, queries_of, keys_of = jnp.asarray(np.stack([row, q_block, kv_block]))[:, order]
  return PairList(rows_of, queries_of, keys_of, wanted.sum(dtype=jnp.int32))


def split_wide(kinds: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
  """Joins key blocks that a query block sees all of into wide ones, for larger and fewer products.

  Args:
    kinds: int8 [R, Nq, Nkv] of `block_kinds`.
    width: key blocks in a wide one.

  Returns:
    Kinds of wide pairs, int8 [R, Nq, Nkv // width], EMPTY unless none of their blocks is; and `kinds` with the
    blocks of the wide pairs EMPTY.
  """
  rows, q_blocks, kv_blocks = kinds.shape
  whole = kv_blocks // width
  parts = kinds[:, :, : whole * width].reshape(rows, q_blocks, whole, width)
  wide = jnp.min(parts, axis=-1)  # FULL only where all are, EMPTY where one is
  left = jnp.where(wide[..., None] != EMPTY, jnp.int8(EMPTY), parts)
  left = left.reshape(rows, q_blocks, whole * width)
  return wide, jnp.concatenate([left, kinds[:, :, whole * width :]], axis=-1)
