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
from jax import lax

EMPTY, PARTIAL, FULL = 0, 1, 2

_FAR = np.int32(2**30)


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


class BlockList(NamedTuple):
  """The block pairs of each row to visit: entries [0, count) of each row of `packed`."""

  packed: jax.Array  # int32 [R, C], 0 past `count`; see kind_of, q_block_of, kv_block_of
  count: jax.Array  # int32 [R]

  @property
  def capacity(self) -> int:
    """Entries that a row has room for: the pairs on or below the diagonal."""
    return self.packed.shape[1]


class BlockTables(NamedTuple):
  """The same pairs twice, for kernels that gather over keys and for those that gather over queries."""

  by_query: BlockList  # ordered by query block, then key block
  by_key: BlockList  # ordered by key block, then query block


_BLOCK_BITS, _KIND_BITS = 14, 2
MAX_BLOCKS = 1 << _BLOCK_BITS
_LAST = np.int32(2**31 - 1)  # sorts behind every pair


def kind_of(packed: jax.Array) -> jax.Array:
  """EMPTY, PARTIAL or FULL."""
  return packed >> (2 * _BLOCK_BITS)


def q_block_of(packed: jax.Array) -> jax.Array:
  """Index of the query block in its row."""
  return (packed >> _BLOCK_BITS) & (MAX_BLOCKS - 1)


def kv_block_of(packed: jax.Array) -> jax.Array:
  """Index of the key block in its row."""
  return packed & (MAX_BLOCKS - 1)


def block_list(
  kinds: jax.Array, *, by_key: bool = False, blocks: tuple[int, int] | None = None
) -> BlockList:
  """Packs the pairs that are not EMPTY: one static capacity, a count per row.

  Args:
    kinds: int8 [R, Nq, Nkv] of `block_kinds` or `split_wide`.
    by_key: orders them by key block, then query block, instead of the other way round.
    blocks: tokens of a query and of a key block where both begin at token 0: pairs above the diagonal then need
      no room. None makes room for all.

  Raises:
    ValueError: rows of more than MAX_BLOCKS blocks.
  """
  _, q_blocks, kv_blocks = kinds.shape
  if max(q_blocks, kv_blocks) > MAX_BLOCKS:
    raise ValueError(f'rows have {max(q_blocks, kv_blocks)} blocks, more than {MAX_BLOCKS}.')
  q_block, kv_block = np.indices((q_blocks, kv_blocks), dtype=np.int32)
  capacity = q_blocks * kv_blocks
  if blocks is not None:
    capacity = int(np.sum(kv_block * blocks[1] < (q_block + 1) * blocks[0]))
  kind = kinds.astype(jnp.int32).reshape(kinds.shape[0], -1)
  q_block, kv_block = q_block.reshape(-1), kv_block.reshape(-1)
  major, minor = (kv_block, q_block) if by_key else (q_block, kv_block)
  # All pairs are sorted, those above the diagonal too: to pick the others out first is a gather, and slower than that.
  # One sort of one integer, which tells all there is to tell of a pair: XLA compiles for TPU an argsort with the
  # gather that follows it four times as long.
  key = jnp.asarray((major << (_BLOCK_BITS + _KIND_BITS)) | (minor << _KIND_BITS))[None] | kind
  key = lax.sort(jnp.where(kind == EMPTY, _LAST, key), dimension=1, is_stable=False)[:, :capacity]
  major, minor = key >> (_BLOCK_BITS + _KIND_BITS), (key >> _KIND_BITS) & (MAX_BLOCKS - 1)
  q_block, kv_block = (minor, major) if by_key else (major, minor)
  packed = (
    ((key & ((1 << _KIND_BITS) - 1)) << (2 * _BLOCK_BITS)) | (q_block << _BLOCK_BITS) | kv_block
  )
  return BlockList(
    jnp.where(key == _LAST, 0, packed), jnp.sum(kind != EMPTY, axis=1, dtype=jnp.int32)
  )


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
