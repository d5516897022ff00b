"""Which pages each row of a decode step reads, as a list that reads a page once for all rows of a block.

The host turns views of prefixes into a work list (numpy); it changes only when rows come or go. The device adds the
blocks of each row's own suffix, which grow with every step (`decode_items`): that list is made once per step and
serves every layer. Rows whose prefixes begin with the same pages lie side by side, so a page of a tree of prefixes
is read by a run of rows of its block.

Not for attention. Invariant: the items of a block are adjacent, in the order of their positions.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PREFIX, SUFFIX = 0, 1  # kinds of items
LEAST_GAIN = 1.1  # of sharing reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixView:
  """What one row reads: the pages of its prefix in order, and the prefix's length in tokens."""

  pages: tuple[int, ...]
  length: int


class WorkList(NamedTuple):
  """Prefix items of one decode step; I items at most, B blocks of R rows, M rows. All int32."""

  item_page: Any  # [I] page to read
  item_start: Any  # [I] position of the page's first token
  item_length: Any  # [I] valid tokens in the page
  item_block: (
    Any  # [I] block of rows that reads it; items of a block are adjacent and in page order
  )
  item_first: Any  # [I] first place in the block that reads it
  item_last: Any  # [I] place after the last one that does
  block_rows: Any  # [B, R] row ids; the last row of a short block is repeated
  row_block: Any  # [M] block of each row
  row_index: Any  # [M] place of each row in its block
  num_items: Any  # [] active items


class DecodeItems(NamedTuple):
  """All items of one decode step, prefix and suffix; C at most, `count` of them active. All int32."""

  kind: jax.Array  # [C] PREFIX or SUFFIX
  prefix_page: jax.Array  # [C] prefix page; of a suffix item that of the prefix item before it
  suffix_page: jax.Array  # [C] suffix page; of a prefix item that of the suffix item before it
  block: jax.Array  # [C] block of rows
  start: jax.Array  # [C] position of the first token
  length: jax.Array  # [C] valid tokens
  first: jax.Array  # [C] first place in the block that reads it
  last: jax.Array  # [C] place after the last one that does
  count: jax.Array  # []
  has_items: jax.Array  # bool [M], whether the block of a row has any


def rows_per_read(group_size: int, prefix_tokens: int, suffix_tokens: int, *, most: int = 8) -> int:
  """Rows of a group that share one read of a page, by a model of what a decode step reads; 1 shares nothing.

  A step waits for keys and values. With R rows to a read it reads ceil(G / R) prefixes and G suffixes in place of G of
  both; suffixes are half grown on average. Where that saves less than a tenth, blocks of rows are not worth their
  padding and every row reads by itself. The choice is made once for an engine, not per step: it moves the rounding of
  log-probs, which may depend on nothing but the sample.

  Args:
    group_size: G, rows whose prompt is the same.
    prefix_tokens: of the longest prompt.
    suffix_tokens: of the longest sample.
    most: rows to a read at most.
  """
  rows = min(group_size, most)
  reads, own = -(-group_size // rows), group_size * suffix_tokens / 2
  gain = (group_size * prefix_tokens + own) / (reads * prefix_tokens + own)
  return rows if gain >= LEAST_GAIN else 1


def make_work_list(
  views: Sequence[PrefixView | None], *, page_size: int, rows_per_block: int, max_items: int
) -> WorkList:
  """Puts rows with common pages side by side and lists what each block of rows reads (numpy, on the host).

  Args:
    views: one per row; None for a row that is not decoding.
    page_size: tokens in a page.
    rows_per_block: rows that share one read of a page.
    max_items: static size of the item arrays.

  Raises:
    ValueError: more items than `max_items`.
  """
  num_rows = len(views)
  block_rows = np.zeros((num_rows, rows_per_block), np.int32)
  row_block, row_index = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
  items: list[tuple[int, ...]] = []
  for block, members in enumerate(_blocks(views, rows_per_block)):
    block_rows[block] = members + [members[-1]] * (rows_per_block - len(members))
    row_block[members], row_index[members] = block, range(len(members))
    items += _block_items([views[row] for row in members], block, page_size)
  if len(items) > max_items:
    raise ValueError(
      f'The work list has {len(items)} items but room for {max_items}. Raise max_items.'
    )
  table = np.zeros((6, max_items), np.int32)
  if items:
    table[:, : len(items)] = np.asarray(items, np.int32).T
  page, start, length, block_of, first, last = table
  return WorkList(
    item_page=page,
    item_start=start,
    item_length=length,
    item_block=block_of,
    item_first=first,
    item_last=last,
    block_rows=block_rows,
    row_block=row_block,
    row_index=row_index,
    num_items=np.int32(len(items)),
  )


def _blocks(views: Sequence[PrefixView | None], rows_per_block: int) -> Iterator[list[int]]:
  """Row ids by block: groups in the order of their first row, groups of one tree behind one another.

  A block never joins rows that share no page: what one reads would keep the others waiting.
  """
  trees: dict[int, dict[tuple[int, ...], list[int]]] = {}
  for row, view in enumerate(views):
    if view is not None:
      root = view.pages[0] if view.pages else -1 - row
      trees.setdefault(root, {}).setdefault(view.pages, []).append(row)
  for tree in trees.values():
    ordered = sorted(tree) if len(tree) > 1 else list(tree)
    rows = [row for pages in ordered for row in tree[pages]]
    for first in range(0, len(rows), rows_per_block):
      yield rows[first : first + rows_per_block]


def _block_items(
  views: Sequence[PrefixView | None], block: int, page_size: int
) -> list[tuple[int, ...]]:
  """Items of one block: at every depth one per run of rows that read the same page to the same length."""
  members = [view for view in views if view is not None]
  items: list[tuple[int, ...]] = []
  depth = 0
  while any(depth * page_size < view.length for view in members):
    start = depth * page_size
    reads = [
      (view.pages[depth], min(page_size, view.length - start)) if start < view.length else None
      for view in members
    ]
    first = 0
    for last in range(1, len(reads) + 1):
      if last == len(reads) or reads[last] != reads[first]:
        read = reads[first]
        if read is not None:
          items.append((read[0], start, read[1], block, first, last))
        first = last
    depth += 1
  return items


def decode_items(
  work: WorkList,
  prefix_length: jax.Array,
  suffix_length: jax.Array,
  suffix_pages: jax.Array,
  *,
  page_size: int,
  window: int | None = None,
) -> DecodeItems:
  """Adds the pages of the rows' own suffixes to the prefix items; on the device.

  Args:
    work: the prefix items.
    prefix_length: int32 [M], tokens of each row's prefix.
    suffix_length: int32 [M], own tokens of each row; 0 for a row that is not in the work list.
    suffix_pages: int32 [M, S], the pages of each row's own tokens in order; read as far as its length says.
    page_size: tokens in one of them.
    window: items that no row of theirs sees any more are left out; None keeps all.

  Returns:
    DecodeItems with room for I + M * S.
  """
  num_rows, per_row = suffix_pages.shape
  index = jnp.arange(work.item_page.shape[0], dtype=jnp.int32)
  of_page = jnp.arange(per_row, dtype=jnp.int32)[:, None]
  row = jnp.arange(num_rows, dtype=jnp.int32)[None]
  begins = of_page * page_size
  own = jnp.clip(suffix_length[None] - begins, 0, page_size)
  live = own > 0
  is_prefix = index < work.num_items
  if window is not None:
    oldest = prefix_length + suffix_length - window
    live = live & (prefix_length[None] + begins + own > oldest[None])
    sees = jnp.where(suffix_length > 0, oldest, jnp.iinfo(jnp.int32).max)
    of_rows = jax.ops.segment_min(sees, work.row_block, num_segments=num_rows)
    is_prefix = is_prefix & (work.item_start + work.item_length > of_rows[work.item_block])

  def both(prefix, suffix):
    suffix = jnp.broadcast_to(suffix, (per_row, num_rows))
    return jnp.concatenate([jnp.asarray(prefix, jnp.int32), suffix.reshape(-1).astype(jnp.int32)])

  blocks = both(work.item_block, work.row_block[None])
  wanted = both(is_prefix, live) > 0
  # Prefix pages first, then row by row; what is not wanted goes to the end.
  place = both(index, index.size + work.row_index[None] * per_row + of_page)
  kind = both(jnp.full_like(index, PREFIX), jnp.full_like(row, SUFFIX))
  page = both(work.item_page, suffix_pages.T)
  visited = jax.ops.segment_max(wanted.astype(jnp.int32), blocks, num_segments=num_rows) > 0
  # Everything is sorted along: some TPU compilers fail at the large gathers that an argsort would need.
  rank = jnp.where(wanted, blocks, jnp.iinfo(jnp.int32).max)
  items = (
    *(kind, page, blocks, both(work.item_start, prefix_length[None] + begins)),
    both(work.item_length, own),
    both(work.item_first, work.row_index[None]),
    both(work.item_last, work.row_index[None] + 1),
  )
  ordered = jax.lax.sort((rank, place, *items), num_keys=2, is_stable=False)
  kind, page, block, start, length, first, last = ordered[2:]
  return DecodeItems(
    kind=kind,
    prefix_page=_latest(page, kind == PREFIX),
    suffix_page=_latest(page, kind == SUFFIX),
    block=block,
    start=start,
    length=length,
    first=first,
    last=last,
    count=jnp.sum(wanted, dtype=jnp.int32),
    has_items=visited[work.row_block],
  )


def _latest(value: jax.Array, where: jax.Array) -> jax.Array:
  """At every place the value of the latest place where `where` holds; 0 before the first."""

  def later(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]):
    return one[0] | other[0], jnp.where(other[0], other[1], one[1])

  found, latest = jax.lax.associative_scan(later, (where, value))
  return jnp.where(found, latest, 0)
