"""Tree attention as Pallas kernels for TPU: forward, dq, and dk with dv, each walking a list of block pairs.

The grid of a kernel is (row, key head, step); a step is one entry of the row's list, so blocks that hold nothing
are neither read nor computed. The query heads of a key head lie in one block of rows, so that keys are read once
for all of them. The softmax state is float32 in VMEM and never leaves it but as output and log-sum-exp.

The backward pass is two kernels: dq walks the list by query block, dk and dv the one by key block, where a block
of a shared prompt adds up over every sample that sees it: no atomics, no partial results in HBM, the same bits
every time. Both take p = exp(s - lse) with the log-sum-exp of the whole row.

Not for rows that live on several devices (`tree_attention` splits heads and rows), nor for what no pair visits:
outputs there are undefined, the caller replaces them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rlax_stack.pallas_kernels import block_tables
from rlax_stack.pallas_kernels.saved_names import named_attention
from rlax_stack.pallas_kernels.tpu_blocks import HIDDEN, LANES, LOWEST, column, dot
from rlax_stack.pallas_kernels.tree_launch import (
  Places,
  TpuSpec,
  Tree,
  block_specs,
  by_kind,
  launch,
  mask_inputs,
  sizes_of,
  step_of,
  visible,
)


def fold(x: jax.Array, kv_heads: int, block_q: int) -> jax.Array:
  """[R, T, H, Dh] -> [R, K, T / block_q, H / K * block_q, Dh]: heads of one key head block by block."""
  rows, tokens, heads, head_dim = x.shape
  group = heads // kv_heads
  x = x.reshape(rows, tokens // block_q, block_q, kv_heads, group, head_dim)
  return x.transpose(0, 3, 1, 4, 2, 5).reshape(rows, kv_heads, -1, group * block_q, head_dim)


def unfold(x: jax.Array, group: int, block_q: int) -> jax.Array:
  """The inverse of `fold`."""
  rows, kv_heads, blocks, _, head_dim = x.shape
  x = x.reshape(rows, kv_heads, blocks, group, block_q, head_dim).transpose(0, 2, 4, 1, 3, 5)
  return x.reshape(rows, blocks * block_q, kv_heads * group, head_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  spec: TpuSpec,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  sinks: jax.Array | None,
  positions: jax.Array,
  subtree_end: jax.Array,
  first_query: jax.Array,
  tables: block_tables.BlockTables,
) -> jax.Array:
  """Attention of rows of whole blocks; see `tree_attention`.

  Args:
    spec: see TpuSpec.
    q: [R, Q, H, Dh]; Q and T divide by their blocks.
    k, v: [R, T, K, Dh].
    sinks: float32 [H] or None.
    positions, subtree_end: int32 [R, T]; a token with subtree_end[j] <= j is left out.
    first_query: int32 scalar, the token that q begins with; divides by block_q.
    tables: of the same blocks.

  Returns:
    [R, Q, H, Dh] in the dtype of q, undefined for tokens that are left out.
  """
  return _attend_fwd(spec, q, k, v, sinks, positions, subtree_end, first_query, tables)[0]


def make_tables(spec: TpuSpec, kinds: jax.Array) -> block_tables.BlockTables:
  """The lists of rows from the kinds of their blocks."""
  square = kinds.shape[1] * spec.block_q == kinds.shape[2] * spec.block_kv
  blocks = (spec.block_q, spec.block_kv) if square else None
  return block_tables.BlockTables(
    block_tables.block_list(kinds, blocks=blocks),
    block_tables.block_list(kinds, by_key=True, blocks=blocks),
  )


def _attend_fwd(spec, q, k, v, sinks, positions, subtree_end, first_query, tables):
  group = q.shape[2] // k.shape[2]
  folded = fold(q, k.shape[2], spec.block_q)
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  tree = Tree(positions, subtree_end, first_query, tables)
  out, lse = named_attention(*_forward(spec, folded, k, v, sinks, tree))
  return unfold(out, group, spec.block_q), (folded, k, v, sinks, tree, out, lse)


def _attend_bwd(spec, residuals, d_out):
  q, k, v, sinks, tree, out, lse = residuals
  group = q.shape[3] // spec.block_q
  do = fold(d_out, k.shape[1], spec.block_q)
  delta = jnp.einsum('rkbid,rkbid->rkbi', do, out, preferred_element_type=jnp.float32)
  rest = (q, k, v, do, lse, delta[:, :, :, None], tree)
  dq = unfold(_d_queries(spec, *rest), group, spec.block_q)
  dk, dv = (x.transpose(0, 2, 1, 3) for x in _d_keys(spec, *rest))
  lives = tree.subtree_end > jnp.arange(tree.subtree_end.shape[1], dtype=jnp.int32)[None]
  q_lives = lax.dynamic_slice_in_dim(lives, tree.first_query, dq.shape[1], axis=1)
  dq = jnp.where(q_lives[:, :, None, None], dq, 0)
  dk, dv = (jnp.where(lives[:, :, None, None], x, 0) for x in (dk, dv))
  d_sinks = None
  if sinks is not None:
    split = (*lse.shape[:3], group, spec.block_q)
    seen = q_lives.reshape(lse.shape[0], 1, lse.shape[2], 1, spec.block_q)
    of_head = sinks.reshape(1, k.shape[1], 1, group, 1)
    share = jnp.exp(of_head - lse.reshape(split)) * delta.reshape(split)
    d_sinks = -jnp.where(seen, share, 0).sum((0, 2, 4)).reshape(-1)
  return dq, dk, dv, d_sinks, None, None, None, None


attend.defvjp(_attend_fwd, _attend_bwd)


def _capped(scores, spec):
  return scores if spec.soft_cap is None else spec.soft_cap * jnp.tanh(scores / spec.soft_cap)


def _forward_kernel(pairs, counts, origin, *refs, spec, capacity, has_sinks):
  refs = list(refs)
  q_ref, k_ref, v_ref, ends_ref = refs[:4]
  refs = refs[4:]
  positions = (refs.pop(0), refs.pop(0)) if spec.window is not None else None
  sink_ref = refs.pop(0) if has_sinks else None
  out_ref, lse_ref, top_ref, total_ref, acc_ref = refs
  step = step_of(pairs, counts, origin, capacity, block_tables.q_block_of)

  @pl.when(step.active & step.first)
  def _():
    if sink_ref is None:
      top_ref[...] = jnp.full_like(top_ref, LOWEST)
      total_ref[...] = jnp.zeros_like(total_ref)
    else:
      top_ref[...] = column(sink_ref[0])
      total_ref[...] = jnp.ones_like(total_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

  def absorb(seen):
    scores = _capped(spec.scale * dot(q_ref[0, 0, 0], k_ref[0, 0], 1), spec)
    if seen is not None:
      scores = jnp.where(seen, scores, HIDDEN)
    top = top_ref[...]
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - new_top[:, :1])
    shrink = jnp.exp(top - new_top)
    values = dot(weights.astype(v_ref.dtype), v_ref[0, 0], 0)
    top_ref[...] = new_top
    total_ref[...] = shrink * total_ref[...] + weights.sum(-1, keepdims=True)
    acc_ref[...] = shrink[:, :1] * acc_ref[...] + values

  def seen():
    spots = (None, None) if positions is None else (x[0] for x in positions)
    shape = (q_ref.shape[3], spec.block_kv)
    return visible(spec, step, shape, ends_ref[0], *spots, transposed=False)

  by_kind(step, seen, absorb)

  @pl.when(step.active & step.last)
  def _():
    total = total_ref[...]
    total = jnp.where(total == 0, 1, total)  # a row that sees nobody gives 0
    out_ref[0, 0, 0] = (acc_ref[...] / total[:, :1]).astype(out_ref.dtype)
    lse_ref[0, 0, 0] = (top_ref[...] + jnp.log(total)).T[:1]


def _dq_kernel(pairs, counts, origin, *refs, spec, capacity):
  q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, ends_ref = refs[:7]
  refs = list(refs[7:])
  positions = (refs.pop(0), refs.pop(0)) if spec.window is not None else None
  dq_ref, lse_column, delta_column, acc_ref = refs
  step = step_of(pairs, counts, origin, capacity, block_tables.q_block_of)

  @pl.when(step.active & step.first)
  def _():
    lse_column[...] = column(lse_ref[0, 0, 0])
    delta_column[...] = column(delta_ref[0, 0, 0])
    acc_ref[...] = jnp.zeros_like(acc_ref)

  def absorb(seen):
    k = k_ref[0, 0]
    scores = _capped(spec.scale * dot(q_ref[0, 0, 0], k, 1), spec)
    weights = jnp.exp(scores - lse_column[:, :1])
    if seen is not None:
      weights = jnp.where(seen, weights, 0)
    d_weights = dot(do_ref[0, 0, 0], v_ref[0, 0], 1)
    d_scores = _d_raw(weights * (d_weights - delta_column[:, :1]), scores, spec)
    acc_ref[...] += dot(d_scores.astype(k.dtype), k, 0)

  def seen():
    spots = (None, None) if positions is None else (x[0] for x in positions)
    shape = (q_ref.shape[3], spec.block_kv)
    return visible(spec, step, shape, ends_ref[0], *spots, transposed=False)

  by_kind(step, seen, absorb)

  @pl.when(step.active & step.last)
  def _():
    dq_ref[0, 0, 0] = acc_ref[...].astype(dq_ref.dtype)


def _d_raw(d_capped, capped, spec):
  """Gradient of the scaled product from that of the (capped) score."""
  if spec.soft_cap is not None:
    d_capped = d_capped * (1.0 - jnp.square(capped / spec.soft_cap))
  return spec.scale * d_capped


def _dkv_kernel(pairs, counts, origin, *refs, spec, capacity):
  q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, ends_ref = refs[:7]
  refs = list(refs[7:])
  positions = (refs.pop(0), refs.pop(0)) if spec.window is not None else None
  dk_ref, dv_ref, dk_acc, dv_acc = refs
  step = step_of(pairs, counts, origin, capacity, block_tables.kv_block_of)

  @pl.when(step.active & step.first)
  def _():
    dk_acc[...] = jnp.zeros_like(dk_acc)
    dv_acc[...] = jnp.zeros_like(dv_acc)

  def absorb(seen):
    # Keys by queries: rows of lse and delta then need no turning.
    q, do = q_ref[0, 0, 0], do_ref[0, 0, 0]
    scores = _capped(spec.scale * dot(k_ref[0, 0], q, 1), spec)
    weights = jnp.exp(scores - lse_ref[0, 0, 0])
    if seen is not None:
      weights = jnp.where(seen, weights, 0)
    d_weights = dot(v_ref[0, 0], do, 1)
    d_scores = _d_raw(weights * (d_weights - delta_ref[0, 0, 0]), scores, spec)
    dv_acc[...] += dot(weights.astype(do.dtype), do, 0)
    dk_acc[...] += dot(d_scores.astype(q.dtype), q, 0)

  def seen():
    spots = (None, None) if positions is None else (x[0] for x in positions)
    shape = (spec.block_kv, q_ref.shape[3])
    return visible(spec, step, shape, ends_ref[0], *spots, transposed=True)

  by_kind(step, seen, absorb)

  @pl.when(step.active & step.last)
  def _():
    dk_ref[0, 0] = dk_acc[...].astype(dk_ref.dtype)
    dv_ref[0, 0] = dv_acc[...].astype(dv_ref.dtype)


def _forward(spec, q, k, v, sinks, tree):
  """Returns out like the folded q, and lse, float32 [R, K, T / block_q, 1, group * block_q]."""
  size, listed = sizes_of(q, k, spec), tree.tables.by_query
  specs, lanes = block_specs(spec, size, Places(listed.capacity)), size.lanes(spec)
  masks, mask_specs = mask_inputs(spec, specs, tree)
  inputs, in_specs = [q, k, v, *masks], [specs['q'], specs['kv'], specs['kv'], *mask_specs]
  if sinks is not None:
    of_rows = jnp.repeat(sinks.reshape(size.kv_heads, size.group), spec.block_q, axis=1)
    inputs.append(of_rows.astype(jnp.float32)[:, None])
    in_specs.append(pl.BlockSpec((1, 1, lanes), lambda row, head, *_: (head, 0, 0)))
  outputs = (
    jax.ShapeDtypeStruct(q.shape, q.dtype),
    jax.ShapeDtypeStruct((*q.shape[:3], 1, lanes), jnp.float32),
  )
  state = pltpu.VMEM((lanes, LANES), jnp.float32)
  scratch = [state, state, pltpu.VMEM((lanes, size.head_dim), jnp.float32)]
  kernel = functools.partial(_forward_kernel, has_sinks=sinks is not None)
  out_specs = [specs['q'], specs['per_q']]
  return launch(
    'tree_attention',
    spec,
    kernel,
    size,
    tree,
    listed,
    inputs,
    in_specs,
    outputs,
    out_specs,
    scratch,
    2,
  )


def _backward_inputs(spec, q, k, v, do, lse, delta, tree, listed):
  size = sizes_of(q, k, spec)
  specs = block_specs(spec, size, Places(listed.capacity))
  masks, mask_specs = mask_inputs(spec, specs, tree)
  in_specs = [specs[n] for n in ('q', 'kv', 'kv', 'q', 'per_q', 'per_q')] + mask_specs
  return size, specs, [q, k, v, do, lse, delta, *masks], in_specs


def _d_queries(spec, q, k, v, do, lse, delta, tree):
  listed = tree.tables.by_query
  size, specs, inputs, in_specs = _backward_inputs(spec, q, k, v, do, lse, delta, tree, listed)
  lanes = size.lanes(spec)
  column = pltpu.VMEM((lanes, LANES), jnp.float32)
  scratch = [column, column, pltpu.VMEM((lanes, size.head_dim), jnp.float32)]
  outputs = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
  (dq,) = launch(
    'tree_attention_dq',
    spec,
    _dq_kernel,
    size,
    tree,
    listed,
    inputs,
    in_specs,
    outputs,
    [specs['q']],
    scratch,
    3,
  )
  return dq


def _d_keys(spec, q, k, v, do, lse, delta, tree):
  listed = tree.tables.by_key
  size, specs, inputs, in_specs = _backward_inputs(spec, q, k, v, do, lse, delta, tree, listed)
  acc = pltpu.VMEM((spec.block_kv, size.head_dim), jnp.float32)
  outputs = (jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype))
  out_specs = [specs['kv'], specs['kv']]
  return launch(
    'tree_attention_dkv',
    spec,
    _dkv_kernel,
    size,
    tree,
    listed,
    inputs,
    in_specs,
    outputs,
    out_specs,
    [acc, acc],
    4,
  )
