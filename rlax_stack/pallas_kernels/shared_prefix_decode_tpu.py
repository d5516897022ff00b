"""Shared-prefix decode as one Pallas kernel for TPU: a grid over the items of a step, block of rows by block of rows.

The TPU runs its grid in order, so one float32 online softmax per block of rows lives in VMEM while the block's prefix
pages and then its rows' own suffix blocks pass by: no partial results in HBM, no merge. A page brings all its key heads
at once. An item that only some rows of the block read leaves the state of the others as it is, bit for bit.

Not for how rows come to blocks (`decode_work`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rlax_stack.pallas_kernels.decode_work import PREFIX, DecodeItems, WorkList
from rlax_stack.pallas_kernels.tpu_blocks import HIDDEN, LANES, LOWEST, dot


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
    q: [M, K, R, Dh], scaled.
    prefix: k, v [L, N, K, page, Dh] and their scales [L, N, K, page] or None.
    suffix: k, v [L, N, K, page, Dh] and their scales [L, N, K, page] or None.
    work: how rows lie in blocks.
    items: from `decode_items`.
    layer: which of the L layers to read.
    oldest: int32 [M], position of the oldest token that a row sees; None: all.
    soft_cap: of the scores, or None.
    interpret: False, True, or pltpu.InterpretParams.

  Returns:
    Largest score and sum of weights, float32 [M, K, R], and weighted values, float32 [M, K, R, Dh]; rows without an
    item have sum 0.
  """
  num_rows, num_kv, ratio, head_dim = q.shape
  blocks, places = work.block_rows.shape
  least = 32 // q.dtype.itemsize  # rows of a tile
  columns = -(-places * ratio // least) * least
  rows = q[work.block_rows].transpose(0, 2, 1, 3, 4).reshape(blocks, num_kv, -1, head_dim)
  rows = jnp.pad(rows, ((0, 0), (0, 0), (0, columns - places * ratio), (0, 0)))
  tables = [x for x in (*prefix, *suffix) if x is not None]
  inputs = [rows, *(_with_lanes(x) for x in tables)]
  in_specs = [pl.BlockSpec((1, num_kv, columns, head_dim), _of_block)]
  for of_prefix, group in ((True, prefix), (False, suffix)):
    in_specs += [_table_spec(x, of_prefix=of_prefix) for x in group if x is not None]
  if oldest is not None:
    seen_from = jnp.repeat(oldest[work.block_rows], ratio, axis=1)
    seen_from = jnp.pad(seen_from, ((0, 0), (0, columns - places * ratio)))
    inputs.append(jnp.broadcast_to(seen_from[..., None], (*seen_from.shape, LANES)))
    in_specs.append(pl.BlockSpec((1, columns, LANES), lambda i, *_: (_of_block(i, *_)[0], 0, 0)))
  state = jax.ShapeDtypeStruct((blocks, num_kv, columns, LANES), jnp.float32)
  values = jax.ShapeDtypeStruct((blocks, num_kv, columns, head_dim), jnp.float32)
  kernel = functools.partial(
    _kernel,
    soft_cap=soft_cap,
    ratio=ratio,
    scaled=prefix[2] is not None,
    windowed=oldest is not None,
  )
  capacity = items.kind.size
  page_bytes = sum(x.dtype.itemsize * x[0, 0].size for x in tables) // 2
  out = pl.pallas_call(
    kernel,
    out_shape=(state, state, values),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=9,
      grid=(items.count,),
      in_specs=in_specs,
      out_specs=[
        pl.BlockSpec((1, num_kv, columns, LANES), _of_block),
        pl.BlockSpec((1, num_kv, columns, LANES), _of_block),
        pl.BlockSpec((1, num_kv, columns, head_dim), _of_block),
      ],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('arbitrary',)),
    cost_estimate=pl.CostEstimate(
      flops=4 * capacity * num_kv * columns * prefix[0].shape[3] * head_dim,
      transcendentals=capacity * num_kv * columns * prefix[0].shape[3],
      bytes_accessed=capacity * page_bytes,
    ),
    interpret=interpret,
    name='shared_prefix_decode',
  )(*_scalars(items, layer), *inputs)
  return _of_rows(out, work, items, ratio)


def _scalars(items: DecodeItems, layer: int | jax.Array) -> tuple[jax.Array, ...]:
  """What index maps and the kernel read of the items: one int32 array each, and the layer."""
  pages = (items.kind, items.prefix_page, items.suffix_page)
  spans = (items.block, items.start, items.length, items.first, items.last)
  return (*pages, *spans, jnp.asarray(layer, jnp.int32).reshape(1))


def _of_rows(out, work: WorkList, items: DecodeItems, ratio: int) -> tuple[jax.Array, ...]:
  """Blocks back to rows; blocks that no item visited were never written."""
  places = work.block_rows.shape[1]

  def rows_of(x):
    x = x[:, :, : places * ratio].reshape(x.shape[0], x.shape[1], places, ratio, x.shape[3])
    x = x[work.row_block, :, work.row_index]
    return jnp.where(items.has_items[:, None, None, None], x, 0)

  top, total, values = (rows_of(x) for x in out)
  return top[..., 0], total[..., 0], values


def _with_lanes(x: jax.Array) -> jax.Array:
  """Scales [L, N, K, S] as [L, N, K, 1, S]: a block then ends in whole dimensions."""
  return x[:, :, :, None] if x.ndim == 4 else x


def _of_block(i, kind, prefix_page, suffix_page, block, *rest):
  del kind, prefix_page, suffix_page, rest
  return block[i], 0, 0, 0


def _table_spec(x: jax.Array, *, of_prefix: bool) -> pl.BlockSpec:
  """All key heads of one page. Items of the other kind stay at the page read last, so nothing is fetched."""
  shape = (1, 1, *(x.shape[2:] if x.ndim == 5 else (x.shape[2], 1, x.shape[3])))

  def index(i, kind, prefix_page, suffix_page, *rest):
    del kind
    return rest[-1][0], (prefix_page if of_prefix else suffix_page)[i], 0, 0, 0

  return pl.BlockSpec(shape, index)


def _kernel(*refs, soft_cap, ratio, scaled, windowed):
  kind, _, _, block, start, length, first, last, _ = refs[:9]
  refs = list(refs[9:])
  q_ref = refs.pop(0)
  width = 4 if scaled else 2
  prefix, refs = refs[:width], refs[width:]
  suffix, refs = refs[:width], refs[width:]
  oldest_ref = refs.pop(0) if windowed else None
  top_ref, total_ref, values_ref = refs
  i, count = pl.program_id(0), pl.num_programs(0)
  here = block[i]

  @pl.when((i == 0) | (block[jnp.maximum(i - 1, 0)] != here))
  def _():
    top_ref[...] = jnp.full_like(top_ref, LOWEST)
    total_ref[...] = jnp.zeros_like(total_ref)
    values_ref[...] = jnp.zeros_like(values_ref)

  def absorb(k_ref, v_ref, k_scale_ref=None, v_scale_ref=None):
    tokens = k_ref.shape[3]
    columns = q_ref.shape[2]
    token = lax.broadcasted_iota(jnp.int32, (columns, tokens), 1)
    place = lax.broadcasted_iota(jnp.int32, (columns, tokens), 0)
    seen = (token < length[i]) & (place >= first[i] * ratio) & (place < last[i] * ratio)
    if oldest_ref is not None:
      seen = seen & (start[i] + token >= oldest_ref[0][:, :1])
    # What lies past the length may be NaN, and 0 times NaN is NaN.
    there = lax.broadcasted_iota(jnp.int32, (tokens, v_ref.shape[4]), 0) < length[i]
    for head in range(q_ref.shape[1]):
      q = q_ref[0, head]
      scores = dot(q, k_ref[0, 0, head].astype(q.dtype), 1)
      if k_scale_ref is not None:
        scores = scores * k_scale_ref[0, 0, head]
      if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
      scores = jnp.where(seen, scores, HIDDEN)
      top = top_ref[0, head]
      new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
      weights = jnp.exp(scores - new_top[:, :1])
      shrink = jnp.exp(top - new_top)
      total_ref[0, head] = shrink * total_ref[0, head] + weights.sum(-1, keepdims=True)
      if v_scale_ref is not None:
        weights = weights * jnp.where(seen, v_scale_ref[0, 0, head], 0)
      v = jnp.where(there, v_ref[0, 0, head].astype(q.dtype), 0)
      values_ref[0, head] = shrink[:, :1] * values_ref[0, head] + dot(weights.astype(q.dtype), v, 0)
      top_ref[0, head] = new_top

  @pl.when((i < count) & (kind[i] == PREFIX))
  def _():
    absorb(*prefix)

  @pl.when((i < count) & (kind[i] != PREFIX))
  def _():
    absorb(*suffix)
