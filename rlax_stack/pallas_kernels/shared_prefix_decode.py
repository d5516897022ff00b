"""Attention of one decode step over prefixes that many rows share, each prefix read once per block of rows.

A decode row attends to a shared prefix (its prompt, stored once as pages) and to its own suffix. Which row reads which
page is a work list (`decode_work`); the device loops over its active items, so rows come and go one by one with static
shapes and the cost follows the work. One float32 online softmax runs over a row's prefix pages and then over its suffix
blocks: the merge is exact.
Not for prefill or training (see tree_attention). Here are the choice of the form, the plain-XLA form and the reference.

There is no other, unshared path to fall back to: a prefix that one row reads is an item of one row, with the bytes and
the products of the unshared kernel.

Invariant: a row's result depends on its own query, pages and suffix only, bit for bit, never on its place in the batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rlax_stack import sharding
from rlax_stack.pallas_kernels import dispatch, shared_prefix_decode_tpu
from rlax_stack.pallas_kernels.decode_work import DecodeItems, PrefixView, WorkList, decode_items

NO_WINDOW = 2**30  # a window that is longer than any text
_NEGATIVE = -1e30  # finite, so that exp(masked - max) is 0 and never NaN


class KVScales(NamedTuple):
  """Scales of quantised keys and values, float32, one per token and key head."""

  prefix_k: jax.Array  # [L, N, K, page_size]
  prefix_v: jax.Array
  suffix_k: jax.Array  # [L, N, K, page_size]
  suffix_v: jax.Array


class DecodePlan(NamedTuple):
  """What one decode step reads and how; made once per step, it serves every layer."""

  implementation: str  # 'pallas' or 'xla'
  on_gpu: bool  # 'pallas' is the form for Hopper
  oldest: jax.Array | None  # int32 [M], position of the oldest token that each row sees; None: all
  prefix_length: jax.Array  # int32 [M]
  suffix_length: jax.Array  # int32 [M]
  suffix_pages: jax.Array  # int32 [M, S]
  work: WorkList
  items: DecodeItems | None  # of the Pallas form
  mesh: Mesh | None  # heads lie over its tensor axis


def plan_decode(
  work: WorkList,
  prefix_length: jax.Array,
  suffix_length: jax.Array,
  suffix_pages: jax.Array,
  *,
  suffix_page_size: int,
  window: int | None = None,
  implementation: str = 'auto',
  mesh: Mesh | None = None,
) -> DecodePlan:
  """Lists what a step reads.

  Args:
    work: the prefix items; rows that are not in it get finite values without meaning.
    prefix_length: int32 [M], tokens of each row's prefix (used by the window only).
    suffix_length: int32 [M], own tokens of each row, >= 1 where the row is in the work list, else 0.
    suffix_pages: int32 [M, S], the pages of each row's own tokens in order; read as far as its length says.
    suffix_page_size: tokens in one of them.
    window: a query sees the newest `window` tokens, itself included; None sees all.
    implementation: 'auto', 'pallas' (TPU; Hopper GPUs for bfloat16 heads of width 64 and 128) or 'xla'; 'auto' is
      'pallas' on a TPU and 'xla' elsewhere, on a Hopper GPU too: its kernel was never measured on one.
    mesh: heads of queries and keys lie over its tensor axis, rows and pages are whole. None: arrays are whole.

  Raises:
    ValueError: an implementation that does not exist or is absent here.
  """
  device, name = dispatch.target_device(mesh), 'shared-prefix decode'
  absent, on_gpu = dispatch.no_pallas(device, on_gpu=True), dispatch.is_gpu(device)
  forms = dispatch.WITHOUT_REFERENCE
  chosen = dispatch.choose(name, implementation, absent=absent, measured=not on_gpu, forms=forms)
  items, oldest = None, None
  if window is not None:
    oldest = prefix_length + suffix_length - window
  if chosen == 'pallas':
    items = decode_items(
      work,
      prefix_length,
      suffix_length,
      suffix_pages,
      page_size=suffix_page_size,
      window=window,
    )
  return DecodePlan(
    chosen, on_gpu, oldest, prefix_length, suffix_length, suffix_pages, work, items, mesh
  )


def select_plan(sees_all: jax.Array, whole: DecodePlan, windowed: DecodePlan) -> DecodePlan:
  """`whole` where the bool scalar `sees_all` is true, else `windowed`: for a loop over layers of both kinds.

  Both are plans of one step, `whole` with the window NO_WINDOW.
  """
  parts = ((plan.oldest, plan.items) for plan in (whole, windowed))
  oldest, items = jax.tree.map(lambda a, b: jnp.where(sees_all, a, b), *parts)
  return windowed._replace(oldest=oldest, items=items)


class _Softmax(NamedTuple):
  """Running softmax of C queries over N batches: largest score, sum and weighted values, float32."""

  largest: jax.Array  # [..., C]
  total: jax.Array  # [..., C]
  values: jax.Array  # [..., C, Dh]


class _Keys(NamedTuple):
  """Keys and values of one read, [..., S, Dh], with their scales [..., S] where they are quantised."""

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None


def _absorb(
  state: _Softmax, q: jax.Array, keys: _Keys, seen: jax.Array, soft_cap: float | None
) -> _Softmax:
  """Adds keys and values to the softmax of q [..., C, Dh]; seen is bool [..., C or 1, S]."""
  k, v = keys.k.astype(q.dtype), keys.v.astype(q.dtype)
  batch = tuple(range(q.ndim - 2))
  last = q.ndim - 1
  # [S, C] and not [C, S]: with few queries the CPU's matmul is several times quicker this way round.
  scores = jax.lax.dot_general(
    k, q, (((last,), (last,)), (batch, batch)), preferred_element_type=jnp.float32
  )
  scores = jnp.swapaxes(scores, -1, -2)
  if keys.k_scale is not None:
    scores = scores * keys.k_scale[..., None, :]
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  scores = jnp.where(seen, scores, _NEGATIVE)
  largest = jnp.maximum(state.largest, scores.max(-1))
  weights = jnp.exp(scores - largest[..., None])
  keep = jnp.exp(state.largest - largest)
  of_values = weights if keys.v_scale is None else weights * keys.v_scale[..., None, :]
  weighted = jax.lax.dot_general(
    of_values.astype(v.dtype),
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


def _read(tables: tuple[Any, ...], layer: int | jax.Array, page: jax.Array) -> _Keys:
  """A page of keys and values, and of their scales where there are any."""
  return _Keys._make(None if table is None else _page(table, layer, page) for table in tables)


def _over_prefixes(
  q: jax.Array,
  tables: tuple[Any, ...],
  plan: DecodePlan,
  layer: int | jax.Array,
  soft_cap: float | None,
) -> _Softmax:
  """Softmax state of every row [M, K, R] over its prefix; q [M, K, R, Dh]."""
  _, num_kv, ratio, head_dim = q.shape
  work = plan.work
  rows_per_block = work.block_rows.shape[1]
  columns = rows_per_block * ratio
  page_size = tables[0].shape[3]
  token = jnp.arange(page_size, dtype=jnp.int32)
  place = jnp.arange(columns, dtype=jnp.int32)[:, None]

  def absorb_item(i: jax.Array, blocks: _Softmax) -> _Softmax:
    block = work.item_block[i]
    rows = work.block_rows[block]
    queries = q[rows].transpose(1, 0, 2, 3).reshape(num_kv, columns, head_dim)
    reads = (place >= work.item_first[i] * ratio) & (place < work.item_last[i] * ratio)
    seen = (reads & (token < work.item_length[i])[None])[None]
    if plan.oldest is not None:
      visible = (work.item_start[i] + token)[None, :] >= plan.oldest[rows][:, None]
      seen = seen & jnp.repeat(visible, ratio, axis=0)[None]
    fresh = work.item_start[i] == 0
    state = jax.tree.map(
      lambda table, empty: jnp.where(fresh & (work.item_first[i] == 0), empty, table[block]),
      blocks,
      _empty((num_kv, columns), head_dim),
    )
    state = _absorb(state, queries, _read(tables, layer, work.item_page[i]), seen, soft_cap)
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
  plan: DecodePlan,
  *,
  layer: int | jax.Array = 0,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  kv_scales: KVScales | None = None,
) -> jax.Array:
  """One query per row against its shared prefix and its own suffix (the newest token included).

  Args:
    q: [M, H, Dh], rotated, unscaled.
    prefix_k, prefix_v: [L, N, K, page_size, Dh], pages of all prefixes; in the dtype of q, or int8 or fp8 with scales.
    suffix_k, suffix_v: [L, N, K, suffix_page_size, Dh], pages of the rows' own tokens, which nobody shares.
    plan: from `plan_decode`.
    layer: which of the L layers to read; may be traced.
    scale: of the scores; None is Dh**-0.5.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); None for none.
    sinks: float32 [H], a score per head that takes part in the softmax and has no value; None for none.
    kv_scales: of quantised keys and values; None where they are not.

  Returns:
    [M, H, Dh] in q's dtype; softmax in float32.

  Raises:
    ValueError: 'pallas' on a GPU for arrays that its kernel does not fit.
    ConfigError: a mesh that the heads do not divide over.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  arrays = (q, prefix_k, prefix_v, suffix_k, suffix_v, sinks, kv_scales)

  def attend(*arrays):
    return _attend(plan, layer, scale, soft_cap, *arrays)

  if plan.mesh is None or plan.mesh.size == 1:
    return attend(*arrays)
  by_head, of_page = P(None, 'tensor'), P(None, None, 'tensor')
  sharding.check_divisible('the queries (rows, heads, width)', q.shape, by_head, plan.mesh)
  sharding.check_divisible('the pages', prefix_k.shape, of_page, plan.mesh)
  scale_specs = None if kv_scales is None else KVScales._make([of_page] * 4)
  specs = (
    by_head,
    *(of_page,) * 4,
    None if sinks is None else P('tensor'),
    scale_specs,
  )
  return jax.shard_map(attend, mesh=plan.mesh, in_specs=specs, out_specs=by_head, check_vma=False)(
    *arrays
  )


def _attend(
  plan, layer, factor, soft_cap, q, prefix_k, prefix_v, suffix_k, suffix_v, sinks, kv_scales
):
  """`shared_prefix_decode` of the heads at hand."""
  num_rows, num_heads, head_dim = q.shape
  num_kv = prefix_k.shape[2]
  q4 = (q.astype(jnp.float32) * factor).astype(q.dtype)
  q4 = q4.reshape(num_rows, num_kv, num_heads // num_kv, head_dim)
  scales = (None,) * 4 if kv_scales is None else tuple(kv_scales)
  prefix, suffix = (prefix_k, prefix_v, *scales[:2]), (suffix_k, suffix_v, *scales[2:])
  if plan.items is not None:
    softmax_state = (
      _gpu_form(plan, q4, prefix, suffix) if plan.on_gpu else shared_prefix_decode_tpu.softmax_state
    )
    state = _Softmax(
      *softmax_state(q4, prefix, suffix, plan.work, plan.items, layer, plan.oldest, soft_cap)
    )
  else:
    state = _over_prefixes(q4, prefix, plan, layer, soft_cap)
    state = _over_suffixes(state, q4, suffix, plan, layer, soft_cap)
  if sinks is not None:
    sink = sinks.astype(jnp.float32).reshape(1, num_kv, -1)
    largest = jnp.maximum(state.largest, sink)
    keep = jnp.exp(state.largest - largest)
    total = state.total * keep + jnp.exp(sink - largest)
    state = _Softmax(largest, total, state.values * keep[..., None])
  total = jnp.where(state.total == 0, 1.0, state.total)
  return (state.values / total[..., None]).reshape(num_rows, num_heads, head_dim).astype(q.dtype)


def _gpu_form(plan: DecodePlan, q: jax.Array, prefix: tuple[Any, ...], suffix: tuple[Any, ...]):
  """The form for Hopper, where it fits the arrays."""
  # Imported where it is chosen: Mosaic GPU takes a quarter of a second, and others have no use for it.
  from rlax_stack.pallas_kernels import shared_prefix_decode_gpu

  rows_per_block = plan.work.block_rows.shape[1]
  absent = dispatch.no_gpu_form(q.dtype, q.shape[-1]) or shared_prefix_decode_gpu.no_form(
    prefix, suffix, columns=rows_per_block * q.shape[2]
  )
  dispatch.choose('shared-prefix decode', 'pallas', absent=absent)
  return shared_prefix_decode_gpu.softmax_state


def _over_suffixes(
  state: _Softmax,
  q: jax.Array,
  tables: tuple[Any, ...],
  plan: DecodePlan,
  layer: int | jax.Array,
  soft_cap: float | None,
) -> _Softmax:
  """Adds every row's own tokens; q [M, K, R, Dh]."""
  block_size = tables[0].shape[3]
  offset = jnp.arange(block_size, dtype=jnp.int32)[None, :]

  def absorb_block(i: jax.Array, state: _Softmax) -> _Softmax:
    index = i * block_size + offset
    seen = index < plan.suffix_length[:, None]
    if plan.oldest is not None:
      seen = seen & (plan.prefix_length[:, None] + index >= plan.oldest[:, None])
    page = plan.suffix_pages[:, i]
    keys = _Keys._make(
      None if table is None else table.at[layer, page].get(mode='promise_in_bounds')
      for table in tables
    )
    return _absorb(state, q, keys, seen[:, None, None, :], soft_cap)

  blocks = (jnp.max(plan.suffix_length) + (block_size - 1)) // block_size
  return jax.lax.fori_loop(0, blocks, absorb_block, state)


def shared_prefix_decode_reference(
  q: np.ndarray,
  prefix_k: np.ndarray,
  prefix_v: np.ndarray,
  suffix_k: np.ndarray,
  suffix_v: np.ndarray,
  suffix_length: np.ndarray,
  suffix_pages: np.ndarray,
  views: Sequence[PrefixView | None],
  *,
  layer: int = 0,
  window: int | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks: np.ndarray | None = None,
) -> np.ndarray:
  """The same in plain numpy float64, one row at a time; rows without a view get zeros."""
  num_rows, num_heads, head_dim = q.shape
  num_kv = prefix_k.shape[2]
  scale = head_dim**-0.5 if scale is None else scale
  out = np.zeros(q.shape)

  def keys_of(prefix: np.ndarray, suffix: np.ndarray, row: int, view: PrefixView) -> np.ndarray:
    pages = [prefix[layer, page] for page in view.pages]
    shared = np.concatenate([prefix[layer, 0, :, :0], *pages], 1)[:, : view.length]
    own = np.concatenate(list(suffix[layer, suffix_pages[row]]), 1)[:, : suffix_length[row]]
    joined = np.concatenate([shared, own], 1).astype(np.float64)
    return joined if window is None else joined[:, -window:]

  for row, view in enumerate(views):
    if view is None:
      continue
    k, v = keys_of(prefix_k, suffix_k, row, view), keys_of(prefix_v, suffix_v, row, view)
    queries = q[row].astype(np.float64).reshape(num_kv, -1, head_dim)
    scores = np.einsum('krd,ksd->krs', queries, k) * scale
    if soft_cap is not None:
      scores = soft_cap * np.tanh(scores / soft_cap)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
      total = total + np.exp(sinks.astype(np.float64).reshape(num_kv, -1, 1) - top)
    weights /= total
    out[row] = np.einsum('krs,ksd->krd', weights, v).reshape(num_heads, head_dim)
  return out
