"""Shared-prefix decode as a Mosaic GPU kernel for Hopper.

A thread block walks those items of its block of rows that are its share: prefix pages, each one read once for all
rows of the block, then pages of the rows' own suffixes. One warpgroup copies keys and values into a ring in shared
memory by TMA, the others own 64 query rows each and keep a float32 online softmax in registers. An item that only some
rows read leaves the state of the others as it is, bit for bit.

The shares of a row are joined afterwards in a fixed order. Which share an item belongs to follows from its own place in
the sequence, so that a row's result does not depend on its neighbours. No atomics.

Not for how rows come to blocks (`decode_work`), nor for quantised keys and values.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlax_stack.pallas_kernels.decode_work import PREFIX, DecodeItems, WorkList
from rlax_stack.pallas_kernels.gpu_tiles import (
  HIDDEN,
  LOG2E,
  LOWEST,
  TILE,
  launch,
  multiply,
  scores_of,
  spread,
  tile_iota,
  vector_over,
)

_STAGES = 4
_PROCESSORS = 132  # of an H100 or H200
_MOST_SHARES = 8


class _Items(NamedTuple):
  """Items ordered by share, and where those of each share begin. All int32."""

  page: jax.Array  # [C] prefix page, or suffix page
  start: jax.Array  # [C]
  length: jax.Array  # [C]
  first: jax.Array  # [C] place in the block
  last: jax.Array  # [C]
  begin: jax.Array  # [B * shares]
  middle: jax.Array  # [B * shares] the first suffix item
  end: jax.Array  # [B * shares]


class _Sizes(NamedTuple):
  """What is static about a call."""

  shares: int
  ratio: int
  workers: int
  page: int  # tokens
  block: int  # tokens
  kv_heads: int
  soft_cap: float | None

  @property
  def page_keys(self) -> int:
    """Tokens of a page that a step takes."""
    return min(self.page, TILE)

  @property
  def block_keys(self) -> int:
    """Tokens of a suffix block that a step takes."""
    return min(self.block, TILE)


def no_form(prefix: tuple[Any, ...], suffix: tuple[Any, ...], *, columns: int) -> str | None:
  """Why the kernel does not fit tables and blocks of rows; None where it does.

  Args:
    prefix: k, v [L, N, K, page, Dh] and their scales or None.
    suffix: k, v [L, N, K, page, Dh] and their scales or None.
    columns: rows of a block times query heads of a key head.
  """
  if prefix[2] is not None:
    return 'on a GPU it reads no quantised keys and values'
  for name, tokens in (
    ('page_size', prefix[0].shape[-2]),
    ('suffix_page_size', suffix[0].shape[-2]),
  ):
    if tokens not in (16, 32) and tokens % TILE:
      return f'on a GPU {name} must be 16, 32 or a multiple of {TILE}, got {tokens}'
  if columns > 2 * TILE:
    return f'on a GPU rows_per_block times the query heads of a key head must be at most {2 * TILE}, got {columns}'
  return None


def softmax_state(
  q: jax.Array,
  prefix: tuple[Any, ...],
  suffix: tuple[Any, ...],
  work: WorkList,
  items: DecodeItems,
  layer: int | jax.Array,
  oldest: jax.Array | None,
  soft_cap: float | None,
  *,
  interpret: Any = False,
) -> tuple[jax.Array, ...]:
  """The online softmax of every row over its prefix and its suffix.

  Args:
    q: bfloat16 [M, K, R, Dh], scaled; Dh is 64 or 128.
    prefix: k, v bfloat16 [L, N, K, page, Dh], and their scales, which `no_form` holds to be None.
    suffix: k, v bfloat16 [L, N, K, page, Dh], likewise. Values past the lengths must be finite.
    work: how rows lie in blocks.
    items: from `decode_items`.
    layer: which of the L layers to read.
    oldest: int32 [M], position of the oldest token that a row sees; None: all.
    soft_cap: of the scores, or None.
    interpret: False or plgpu.InterpretGPUParams.

  Returns:
    Largest score and sum of weights, float32 [M, K, R], and weighted values, float32 [M, K, R, Dh]; rows without an
    item have sum 0.
  """
  num_rows, kv_heads, ratio, head_dim = q.shape
  blocks, places = work.block_rows.shape
  tiles = -(-places * ratio // TILE)
  busy = kv_heads * -(-num_rows // places)
  sizes = _Sizes(
    shares=max(1, min(_MOST_SHARES, 2 * _PROCESSORS // busy)),
    ratio=ratio,
    workers=tiles,
    page=prefix[0].shape[-2],
    block=suffix[0].shape[-2],
    kv_heads=kv_heads,
    soft_cap=soft_cap,
  )
  ordered = _order(items, sizes, blocks)
  pad = ((0, 0), (0, 0), (0, tiles * TILE - places * ratio), (0, 0))
  rows = q[work.block_rows].transpose(0, 2, 1, 3, 4).reshape(blocks, kv_heads, -1, head_dim)
  # Tables as matrices of all their tokens: a copy then has two dimensions, however the table is cut.
  tables = zip(('page_k', 'page_v', 'block_k', 'block_v'), (*prefix[:2], *suffix[:2]), strict=True)
  inputs = {'q': jnp.pad(rows, pad)} | {name: x.reshape(-1, head_dim) for name, x in tables}
  # Pages of the layers before.
  before = jnp.asarray([_per_layer(x[0]) for x in (prefix, suffix)], jnp.int32)
  inputs |= {'layer_begins': jnp.asarray(layer, jnp.int32) * before} | ordered._asdict()
  if oldest is not None:
    inputs['oldest'] = jnp.pad(jnp.repeat(oldest[work.block_rows], ratio, axis=1), pad[1:3])
  state = jax.ShapeDtypeStruct((blocks, sizes.shares, kv_heads, tiles * TILE), jnp.float32)
  values = jax.ShapeDtypeStruct((*state.shape, head_dim), jnp.float32)
  found = launch(
    'shared_prefix_decode',
    functools.partial(_kernel, sizes=sizes),
    inputs=inputs,
    outputs={'top': state, 'total': state, 'values': values},
    scratch=_scratch(sizes, head_dim, q.dtype),
    grid={'head': kv_heads, 'share': sizes.shares, 'block': blocks},
    warpgroups=sizes.workers + 1,
    interpret=interpret,
  )
  return _join(found, ordered, work, sizes)


def _per_layer(table: jax.Array) -> int:
  """Pages [K, tokens, Dh] that a layer of a table has."""
  return math.prod(table.shape[1:-3])


def _order(items: DecodeItems, sizes: _Sizes, blocks: int) -> _Items:
  """Deals the items of every block to its shares by their place in the sequence; prefix items come first."""
  is_prefix = items.kind == PREFIX
  page = jnp.where(is_prefix, items.prefix_page, items.suffix_page)
  depth = items.start // jnp.where(is_prefix, sizes.page, sizes.block)
  share = items.block * sizes.shares + depth % sizes.shares
  active = jnp.arange(page.size, dtype=jnp.int32) < items.count
  key = 2 * jnp.where(active, share, blocks * sizes.shares) + (~is_prefix).astype(jnp.int32)
  order = jnp.argsort(key, stable=True)
  edges = jnp.searchsorted(key[order], jnp.arange(2 * blocks * sizes.shares + 1, dtype=jnp.int32))
  edges = edges.astype(jnp.int32)
  own = [x[order] for x in (page, items.start, items.length, items.first, items.last)]
  return _Items(*own, begin=edges[:-1:2], middle=edges[1::2], end=edges[2::2])


def _join(found, ordered: _Items, work: WorkList, sizes: _Sizes) -> tuple[jax.Array, ...]:
  """Blocks back to rows, and the shares of a row to one state; shares without items were never written."""
  blocks, places = work.block_rows.shape
  visited = (ordered.end > ordered.begin).reshape(blocks, sizes.shares)[work.row_block]

  def rows_of(x, default):
    x = x[:, :, :, : places * sizes.ratio]
    x = x.reshape(*x.shape[:3], places, sizes.ratio, *x.shape[4:])
    x = x[work.row_block, :, :, work.row_index]  # [M, shares, K, R, ...]
    return jnp.where(visited.reshape(*visited.shape, *(1,) * (x.ndim - 2)), x, default)

  top, total, values = (rows_of(x, d) for x, d in zip(found, (LOWEST, 0.0, 0.0), strict=True))
  best = top.max(axis=1)
  weight = jnp.exp(top - best[:, None])
  return best, (weight * total).sum(axis=1), (weight[..., None] * values).sum(axis=1)


def _scratch(sizes: _Sizes, head_dim: int, dtype: Any) -> dict[str, Any]:
  keys = max(sizes.page_keys, sizes.block_keys)
  ring = plgpu.SMEM((_STAGES, keys, head_dim), dtype)
  numbers = plgpu.SMEM((sizes.workers, TILE), jnp.float32)
  return {
    'q_smem': plgpu.SMEM((sizes.workers, TILE, head_dim), dtype),
    'k_smem': ring,
    'v_smem': ring,
    'page_weights': plgpu.SMEM((sizes.workers, TILE, sizes.page_keys), dtype),
    'block_weights': plgpu.SMEM((sizes.workers, TILE, sizes.block_keys), dtype),
    'top_smem': numbers,
    'total_smem': numbers,
    'q_full': plgpu.Barrier(num_barriers=sizes.workers),
    'full': plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
    'free': plgpu.Barrier(num_arrivals=sizes.workers, num_barriers=_STAGES),
  }


class _Phase(NamedTuple):
  """Steps over prefix pages, or those over suffix blocks."""

  name: str  # of the table: 'page' or 'block'
  tokens: int  # of an item
  keys: int  # of a step
  first_item: jax.Array
  before: jax.Array  # steps of the phase before
  steps: jax.Array
  first_page: jax.Array  # of the layer

  def item(self, i):
    """Item of a step of the phase."""
    return self.first_item + lax.div(i, self.tokens // self.keys)

  def first_token(self, i):
    """First token of a step in its item."""
    return lax.rem(i, self.tokens // self.keys) * self.keys

  def slot(self, i):
    """Place in the ring."""
    return lax.rem(self.before + i, _STAGES)


def _phases(ref, sizes: _Sizes, share) -> tuple[_Phase, _Phase]:
  begin, middle, end = (ref[name][share] for name in ('begin', 'middle', 'end'))
  page_steps = (middle - begin) * (sizes.page // sizes.page_keys)
  block_steps = (end - middle) * (sizes.block // sizes.block_keys)
  none = jnp.int32(0)
  first_page, first_block = ref['layer_begins'][0], ref['layer_begins'][1]
  return (
    _Phase('page', sizes.page, sizes.page_keys, begin, none, page_steps, first_page),
    _Phase('block', sizes.block, sizes.block_keys, middle, page_steps, block_steps, first_block),
  )


def _kernel(ref, *, sizes: _Sizes):
  wg, head, block = lax.axis_index('wg'), lax.axis_index('head'), lax.axis_index('block')
  share = block * sizes.shares + lax.axis_index('share')
  phases = _phases(ref, sizes, share)
  steps = phases[1].before + phases[1].steps

  @pl.when((wg == sizes.workers) & (steps > 0))
  def _():
    for phase in phases:
      _fill(ref, sizes, phase, head)

  @pl.when((wg < sizes.workers) & (steps > 0))
  def _():
    own = pl.ds(wg * TILE, TILE)
    q_smem = ref['q_smem'].at[wg]
    plgpu.copy_gmem_to_smem(ref['q'].at[block, head, own], q_smem, ref['q_full'].at[wg])
    plgpu.barrier_wait(ref['q_full'].at[wg])
    oldest = vector_over(0, ref['oldest'].at[block, own]) if 'oldest' in ref else None
    top, total = (
      plgpu.layout_cast(jnp.full((TILE,), x, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
      for x in (LOWEST, 0.0)
    )
    acc = plgpu.layout_cast(jnp.zeros(q_smem.shape, jnp.float32), plgpu.Layout.WGMMA)
    state = acc, top, total
    for phase in phases:
      absorb = functools.partial(_absorb, ref, sizes, phase, wg, oldest)
      state = lax.fori_loop(0, phase.steps, absorb, state)
    acc, top, total = state
    here = block, lax.axis_index('share'), head, own
    ref['values'].at[here][...] = acc
    ref['top_smem'].at[wg][...] = top / LOG2E
    ref['total_smem'].at[wg][...] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(ref['top_smem'].at[wg], ref['top'].at[here])
    plgpu.copy_smem_to_gmem(ref['total_smem'].at[wg], ref['total'].at[here])
    plgpu.wait_smem_to_gmem(0)


def _fill(ref, sizes: _Sizes, phase: _Phase, head):
  """The copying warpgroup."""

  @pl.loop(0, phase.steps)
  def _(i):
    slot = phase.slot(i)
    page = phase.first_page + ref['page'][phase.item(i)]
    first = (page * sizes.kv_heads + head) * phase.tokens + phase.first_token(i)

    @pl.when(phase.before + i >= _STAGES)
    def _():
      plgpu.barrier_wait(ref['free'].at[slot])

    for name in ('k', 'v'):
      plgpu.copy_gmem_to_smem(
        ref[f'{phase.name}_{name}'].at[pl.ds(first, phase.keys)],
        ref[f'{name}_smem'].at[slot, pl.ds(0, phase.keys)],
        ref['full'].at[slot],
      )


def _absorb(ref, sizes: _Sizes, phase: _Phase, wg, oldest, i, state):
  """One step of a warpgroup that computes."""
  acc, top, total = state
  slot, item, shape = phase.slot(i), phase.item(i), (TILE, phase.keys)
  k_smem, v_smem = (ref[name].at[slot, pl.ds(0, phase.keys)] for name in ('k_smem', 'v_smem'))
  weights_smem = ref[f'{phase.name}_weights'].at[wg]
  token = phase.first_token(i) + tile_iota(shape, 1)
  place = wg * TILE + tile_iota(shape, 0)
  seen = (token < ref['length'][item]) & (place >= ref['first'][item] * sizes.ratio)
  seen = seen & (place < ref['last'][item] * sizes.ratio)
  if oldest is not None:
    seen = seen & (ref['start'][item] + token >= spread(oldest, shape, 0))
  plgpu.barrier_wait(ref['full'].at[slot])
  products = multiply(ref['q_smem'].at[wg], k_smem.transpose((1, 0)))
  scores, _ = scores_of(products, 1.0, sizes.soft_cap)
  scores = jnp.where(seen, scores, HIDDEN)
  new_top = jnp.maximum(top, scores.max(axis=1))
  shrink = jnp.exp2(top - new_top)
  weights = jnp.exp2(scores - spread(new_top, shape, 0))
  total = total * shrink + weights.sum(axis=1)
  weights_smem[...] = weights.astype(weights_smem.dtype)
  plgpu.commit_smem()
  values = multiply(weights_smem, v_smem)
  plgpu.barrier_arrive(ref['free'].at[slot])
  return acc * spread(shrink, acc.shape, 0) + values, new_top, total
