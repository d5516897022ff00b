"""Attention of one decode step over prefixes that many rows share, each prefix read once per block of rows.

A decode row attends to a shared prefix (its prompt, stored once as pages) and to its own suffix. The host turns
"which row reads which prefix" into a work list of items (page, block of up to `rows_per_block` rows); the device loops
over the active items, so rows come and go one by one with static shapes and the cost follows the work. One float32
online softmax runs over a row's prefix pages and then over its suffix blocks: the merge is exact.
Not for prefill or training (see tree_attention). Plain XLA: the reference and the form for every backend.

Invariant: a row's result depends on its own query, pages and suffix only, bit for bit, never on its place in the batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_NEGATIVE = -1e30  # finite, so that exp(masked - max) is 0 and never NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixView:
  """What one row reads: the pages of its prefix in order, and the prefix's length in tokens."""

  pages: tuple[int, ...]
  length: int


class WorkList(NamedTuple):
  """Items of one decode step; I items at most, B blocks of R rows, M rows. All int32."""

  item_page: Any  # [I] page to read
  item_start: Any  # [I] position of the page's first token
  item_length: Any  # [I] valid tokens in the page
  item_block: (
    Any  # [I] block of rows that reads it; items of a block are adjacent and in page order
  )
  block_rows: Any  # [B, R] row ids; the last row of a short block is repeated
  row_block: Any  # [M] block of each row
  row_index: Any  # [M] place of each row in its block
  num_items: Any  # [] active items


def make_work_list(
  views: Sequence[PrefixView | None], *, page_size: int, rows_per_block: int, max_items: int
) -> WorkList:
  """Groups the rows by prefix (numpy, on the host).

  Args:
    views: one per row; None for a row that is not decoding.
    page_size: tokens in a page.
    rows_per_block: rows that share one read of a page.
    max_items: static size of the item arrays.

  Raises:
    ValueError: more items than `max_items`.
  """
  num_rows = len(views)
  groups: dict[tuple[int, ...], list[int]] = {}
  lengths: dict[tuple[int, ...], int] = {}
  for row, view in enumerate(views):
    if view is not None:
      groups.setdefault(view.pages, []).append(row)
      lengths.setdefault(view.pages, view.length)
  block_rows = np.zeros((num_rows, rows_per_block), np.int32)
  row_block, row_index = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
  items, block = [], 0
  for pages, rows in groups.items():
    length = lengths[pages]
    for first in range(0, len(rows), rows_per_block):
      members = rows[first : first + rows_per_block]
      block_rows[block] = members + [members[-1]] * (rows_per_block - len(members))
      row_block[members], row_index[members] = block, range(len(members))
      starts = range(0, length, page_size)
      items += [(pages[s // page_size], s, min(page_size, length - s), block) for s in starts]
      block += 1
  if len(items) > max_items:
    raise ValueError(
      f'The work list has {len(items)} items but room for {max_items}. Raise max_items.'
    )
  table = np.zeros((4, max_items), np.int32)
  if items:
    table[:, : len(items)] = np.asarray(items, np.int32).T
  page, start, length, block_of = table
  return WorkList(
    item_page=page,
    item_start=start,
    item_length=length,
    item_block=block_of,
    block_rows=block_rows,
    row_block=row_block,
    row_index=row_index,
    num_items=np.int32(len(items)),
  )


class _Softmax(NamedTuple):
  """Running softmax of C queries over N batches: largest score, sum and weighted values, float32."""

  largest: jax.Array  # [..., C]
  total: jax.Array  # [..., C]
  values: jax.Array  # [..., C, Dh]


def _absorb(state: _Softmax, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> _Softmax:
  """Adds keys k, values v [..., S, Dh] to the softmax of q [..., C, Dh]; seen is bool [..., C or 1, S]."""
  batch = tuple(range(q.ndim - 2))
  last = q.ndim - 1
  # [S, C] and not [C, S]: with few queries the CPU's matmul is several times quicker this way round.
  scores = jax.lax.dot_general(
    k, q, (((last,), (last,)), (batch, batch)), preferred_element_type=jnp.float32
  )
  scores = jnp.where(seen, jnp.swapaxes(scores, -1, -2), _NEGATIVE)
  largest = jnp.maximum(state.largest, scores.max(-1))
  weights = jnp.exp(scores - largest[..., None])
  keep = jnp.exp(state.largest - largest)
  weighted = jax.lax.dot_general(
    weights.astype(v.dtype),
    v,
    (((last,), (last - 1,)), (batch, batch)),
    preferred_element_type=jnp.float32,
  )
  return _Softmax(
    largest, state.total * keep + weights.sum(-1), state.values * keep[..., None] + weighted
  )


def _empty(shape: tuple[int, ...], head_dim: int) -> _Softmax:
  return _Softmax(
    jnp.full(shape, _NEGATIVE, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, head_dim), jnp.float32),
  )


def _page(table: jax.Array, layer: int | jax.Array, page: jax.Array) -> jax.Array:
  start = (layer, page) + (0,) * (table.ndim - 2)
  return jax.lax.dynamic_slice(table, start, (1, 1, *table.shape[2:]))[0, 0]


def _over_prefixes(
  q: jax.Array,
  prefix_k: jax.Array,
  prefix_v: jax.Array,
  work: WorkList,
  layer: int | jax.Array,
  oldest: Any,
) -> _Softmax:
  """Softmax state of every row [M, K, R] over its prefix; q [M, K, R, Dh]."""
  num_rows, num_kv, ratio, head_dim = q.shape
  rows_per_block = work.block_rows.shape[1]
  columns = rows_per_block * ratio
  page_size = prefix_k.shape[3]
  token = jnp.arange(page_size, dtype=jnp.int32)

  def absorb_item(i: jax.Array, blocks: _Softmax) -> _Softmax:
    block = work.item_block[i]
    rows = work.block_rows[block]
    queries = q[rows].transpose(1, 0, 2, 3).reshape(num_kv, columns, head_dim)
    seen = jnp.broadcast_to(token < work.item_length[i], (1, 1, page_size))
    if oldest is not None:
      visible = (work.item_start[i] + token)[None, :] >= oldest[rows][:, None]
      seen = seen & jnp.repeat(visible, ratio, axis=0)[None]
    fresh = work.item_start[i] == 0
    state = jax.tree.map(
      lambda table, empty: jnp.where(fresh, empty, table[block]),
      blocks,
      _empty((num_kv, columns), head_dim),
    )
    state = _absorb(
      state,
      queries,
      _page(prefix_k, layer, work.item_page[i]),
      _page(prefix_v, layer, work.item_page[i]),
      seen,
    )
    return jax.tree.map(
      lambda table, new: jax.lax.dynamic_update_index_in_dim(table, new, block, 0), blocks, state
    )

  blocks = _empty((work.block_rows.shape[0], num_kv, columns), head_dim)
  blocks = jax.lax.fori_loop(0, work.num_items, absorb_item, blocks)

  def of_rows(table: jax.Array) -> jax.Array:
    split = table.reshape(-1, num_kv, rows_per_block, ratio, *table.shape[3:])
    return split[work.row_block, :, work.row_index]

  return jax.tree.map(of_rows, blocks)


def shared_prefix_decode(
  q: jax.Array,
  prefix_k: jax.Array,
  prefix_v: jax.Array,
  suffix_k: jax.Array,
  suffix_v: jax.Array,
  prefix_length: jax.Array,
  suffix_length: jax.Array,
  work: WorkList,
  *,
  layer: int | jax.Array = 0,
  window: int | None = None,
  scale: float | None = None,
) -> jax.Array:
  """One query per row against its shared prefix and its own suffix (the newest token included).

  Args:
    q: [M, H, Dh], rotated, unscaled.
    prefix_k, prefix_v: [L, N, K, page_size, Dh], pages of all prefixes.
    suffix_k, suffix_v: [L, S / block, M, K, block, Dh], each row's own tokens in blocks.
    prefix_length: int32 [M], tokens of each row's prefix (used by the window only).
    suffix_length: int32 [M], own tokens of each row, >= 1 where the row is in the work list.
    work: the work list; rows that are not in it get finite values without meaning.
    layer: which of the L layers to read; may be traced.
    window: a query sees the newest `window` tokens, itself included; None sees all.
    scale: of the scores; None is Dh**-0.5.

  Returns:
    [M, H, Dh] in q's dtype; softmax in float32.
  """
  num_rows, num_heads, head_dim = q.shape
  num_kv, block_size = suffix_k.shape[3], suffix_k.shape[4]
  factor = head_dim**-0.5 if scale is None else scale
  q4 = (q.astype(jnp.float32) * factor).astype(q.dtype)
  q4 = q4.reshape(num_rows, num_kv, num_heads // num_kv, head_dim)
  oldest = None if window is None else prefix_length + suffix_length - window
  state = _over_prefixes(q4, prefix_k, prefix_v, work, layer, oldest)
  offset = jnp.arange(block_size, dtype=jnp.int32)[None, :]

  def absorb_block(i: jax.Array, state: _Softmax) -> _Softmax:
    index = i * block_size + offset
    seen = index < suffix_length[:, None]
    if oldest is not None:
      seen = seen & (prefix_length[:, None] + index >= oldest[:, None])
    return _absorb(
      state, q4, _page(suffix_k, layer, i), _page(suffix_v, layer, i), seen[:, None, None, :]
    )

  blocks = (jnp.max(suffix_length) + (block_size - 1)) // block_size
  state = jax.lax.fori_loop(0, blocks, absorb_block, state)
  total = jnp.where(state.total == 0, 1.0, state.total)
  return (state.values / total[..., None]).reshape(num_rows, num_heads, head_dim).astype(q.dtype)


def shared_prefix_decode_reference(
  q: np.ndarray,
  prefix_k: np.ndarray,
  prefix_v: np.ndarray,
  suffix_k: np.ndarray,
  suffix_v: np.ndarray,
  suffix_length: np.ndarray,
  views: Sequence[PrefixView | None],
  *,
  layer: int = 0,
  window: int | None = None,
  scale: float | None = None,
) -> np.ndarray:
  """The same in plain numpy float64, one row at a time; rows without a view get zeros."""
  num_rows, num_heads, head_dim = q.shape
  num_kv = prefix_k.shape[2]
  scale = head_dim**-0.5 if scale is None else scale
  out = np.zeros(q.shape)

  def keys_of(prefix: np.ndarray, suffix: np.ndarray, row: int, view: PrefixView) -> np.ndarray:
    shared = np.concatenate([prefix[layer, page] for page in view.pages], 1)[:, : view.length]
    own = np.concatenate(list(suffix[layer, :, row]), 1)[:, : suffix_length[row]]
    joined = np.concatenate([shared, own], 1).astype(np.float64)
    return joined if window is None else joined[:, -window:]

  for row, view in enumerate(views):
    if view is None:
      continue
    k, v = keys_of(prefix_k, suffix_k, row, view), keys_of(prefix_v, suffix_v, row, view)
    queries = q[row].astype(np.float64).reshape(num_kv, -1, head_dim)
    scores = np.einsum('krd,ksd->krs', queries, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out[row] = np.einsum('krs,ksd->krd', weights, v).reshape(num_heads, head_dim)
  return out
