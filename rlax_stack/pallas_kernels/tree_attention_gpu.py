"""Tree attention as Mosaic GPU kernels for Hopper: forward, dq, and dk with dv, each walking lists of block pairs.

One thread block answers one block of queries of one head (forward, dq) or one block of keys of one key head (dk with
dv). Its warpgroups own 64 rows each and keep their float32 softmax or gradient sums in registers, while the blocks of
the list pass through a ring in shared memory, copied ahead by TMA. Blocks that hold nothing are neither read nor
computed; blocks that are wholly seen come first in a list and are not masked.

The backward pass takes p = exp(s - lse) with the log-sum-exp of the whole row. A key block of a shared prompt adds up
over every sample and every query head of its key head in one thread block: no atomics, no partial results in memory,
the same bits every time.

Not for rows that live on several devices (`tree_attention` splits heads and rows). Products are bfloat16 with float32
sums: the tensor cores have no float32 product.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlax_stack.pallas_kernels import block_tables
from rlax_stack.pallas_kernels.gpu_tiles import (
  HIDDEN,
  LOG2E,
  LOWEST,
  TILE,
  d_products,
  launch,
  multiply,
  multiply_pairs,
  scores_of,
  spread,
  tile_iota,
  vector_over,
)
from rlax_stack.pallas_kernels.saved_names import named_attention


class GpuSpec(NamedTuple):
  """What is static about a call; hashable.

  stages: blocks that the ring in shared memory holds.
  interpret: False or plgpu.InterpretGPUParams.
  """

  scale: float
  window: int | None
  soft_cap: float | None
  block_q: int = 128
  block_kv: int = 128
  stages: int = 2
  interpret: Any = False


class Runs(NamedTuple):
  """The blocks that every block visits: entries [0, whole) are wholly seen, [whole, count) partly. All int32."""

  listed: jax.Array  # [R, N, M]
  whole: jax.Array  # [R, N]
  count: jax.Array  # [R, N]


class GpuTables(NamedTuple):
  """The same pairs twice, for kernels that gather over keys and for those that gather over queries."""

  by_query: Runs
  by_key: Runs


class _Tree(NamedTuple):
  positions: jax.Array  # int32 [R, T]
  subtree_end: jax.Array  # int32 [R, T]
  first_query: jax.Array  # int32 [1]
  tables: GpuTables


def make_tables(spec: GpuSpec, kinds: jax.Array) -> GpuTables:
  """The lists of rows from the kinds of their blocks, int8 [R, Nq, Nkv]."""
  del spec

  def runs(kinds):
    order = jnp.argsort(-kinds, axis=-1, stable=True).astype(jnp.int32)
    whole = jnp.sum(kinds == block_tables.FULL, axis=-1, dtype=jnp.int32)
    return Runs(order, whole, jnp.sum(kinds != block_tables.EMPTY, axis=-1, dtype=jnp.int32))

  return GpuTables(runs(kinds), runs(kinds.swapaxes(1, 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  spec: GpuSpec,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  sinks: jax.Array | None,
  positions: jax.Array,
  subtree_end: jax.Array,
  first_query: jax.Array,
  tables: GpuTables,
) -> jax.Array:
  """Attention of rows of whole blocks; see `tree_attention`.

  Args:
    spec: see GpuSpec.
    q: bfloat16 [R, Q, H, Dh]; Q and T divide by their blocks, Dh is 64 or 128.
    k, v: bfloat16 [R, T, K, Dh].
    sinks: float32 [H] or None.
    positions, subtree_end: int32 [R, T]; a token with subtree_end[j] <= j is left out.
    first_query: int32 scalar, the token that q begins with; divides by block_q.
    tables: of the same blocks.

  Returns:
    [R, Q, H, Dh] in the dtype of q, without meaning for tokens that are left out.
  """
  return _attend_fwd(spec, q, k, v, sinks, positions, subtree_end, first_query, tables)[0]


def _attend_fwd(spec, q, k, v, sinks, positions, subtree_end, first_query, tables):
  tree = _Tree(positions, subtree_end, first_query.reshape(1), tables)
  out, lse = named_attention(*_forward(spec, q, k, v, sinks, tree))
  return out, (q, k, v, sinks, tree, out, lse)


def _attend_bwd(spec, residuals, d_out):
  q, k, v, sinks, tree, out, lse = residuals
  delta = jnp.einsum('rihd,rihd->rhi', d_out, out, preferred_element_type=jnp.float32)
  dq = _d_queries(spec, q, k, v, d_out, lse, delta, tree)
  dk, dv = _d_keys(spec, q, k, v, d_out, lse, delta, tree)
  d_sinks = None
  if sinks is not None:
    # delta is 0 where the caller replaces the output.
    d_sinks = -jnp.sum(jnp.exp(sinks[None, :, None] - lse) * delta, axis=(0, 2))
  return dq, dk, dv, d_sinks, None, None, None, None


attend.defvjp(_attend_fwd, _attend_bwd)


def _seen(spec, shape, q_axis, q_first, kv_first, ends, q_positions, kv_positions):
  """bool of `shape`: the rule for queries on `q_axis` and keys on the other one.

  `ends`, `q_positions` and `kv_positions` are of those tokens; positions are None without a window.
  """
  kv_axis = 1 - q_axis
  q_index = q_first + tile_iota(shape, q_axis)
  kv_index = kv_first + tile_iota(shape, kv_axis)
  seen = (kv_index <= q_index) & (q_index < spread(ends, shape, kv_axis))
  if spec.window is not None:
    back = spread(q_positions, shape, q_axis) - spread(kv_positions, shape, kv_axis)
    seen = seen & (back < spec.window)
  return seen


class _Ring(NamedTuple):
  """Steps whose operands pass through a ring of slots in shared memory; the first warpgroup has them copied.

  A warpgroup of its own for the copies would leave the others 168 registers a thread: too few for dk with dv.
  """

  stages: int
  free: Any  # barriers of the slots
  copy: Any  # (step, slot)
  whole: Any  # steps [0, whole) are wholly seen
  steps: Any

  def prefetch(self, step):
    """Begins the copies of a step, once all warpgroups have done with what was in its slot."""

    @pl.when((lax.axis_index('wg') == 0) & (step < self.steps))
    def _():
      slot = lax.rem(step, self.stages)

      @pl.when(step >= self.stages)
      def _():
        plgpu.barrier_wait(self.free.at[slot])

      self.copy(step, slot)

  def walk(self, absorb, state):
    """Runs absorb(step, slot, state, masked) over the steps that are wholly seen, then over the others."""

    def run(step, state, *, masked):
      self.prefetch(step + (self.stages - 1))
      slot = lax.rem(step, self.stages)
      state = absorb(step, slot, state, masked)
      plgpu.barrier_arrive(self.free.at[slot])
      return state

    for step in range(self.stages - 1):
      self.prefetch(jnp.int32(step))
    state = lax.fori_loop(0, self.whole, functools.partial(run, masked=False), state)
    return lax.fori_loop(self.whole, self.steps, functools.partial(run, masked=True), state)


def _first_key(spec, ref, row, block, step):
  """First key of a step; the blocks of the list may be taken in parts."""
  keys = ref['k_smem'].shape[1]
  parts = spec.block_kv // keys
  listed = ref['listed'][row, block, lax.div(step, parts)]
  return listed * spec.block_kv + lax.rem(step, parts) * keys


def _copy_keys(spec, ref, row, block, kv_head, step, slot):
  """Begins to copy what a step of the kernels that walk over keys reads."""
  here = pl.ds(_first_key(spec, ref, row, block, step), ref['k_smem'].shape[1])
  full = ref['k_full'].at[slot]
  plgpu.copy_gmem_to_smem(ref['k'].at[row, here, kv_head], ref['k_smem'].at[slot], full)
  plgpu.copy_gmem_to_smem(ref['ends'].at[row, here], ref['ends_smem'].at[slot], full)
  if spec.window is not None:
    plgpu.copy_gmem_to_smem(ref['positions'].at[row, here], ref['positions_smem'].at[slot], full)
  full = ref['v_full'].at[slot]
  plgpu.copy_gmem_to_smem(ref['v'].at[row, here, kv_head], ref['v_smem'].at[slot], full)


def _key_ring(spec, dtype, keys, head_dim, workers):
  """Scratch of the kernels that walk over keys: the ring, and barriers that say when its slots are full and free."""
  block = plgpu.SMEM((spec.stages, keys, head_dim), dtype)
  spots = plgpu.SMEM((spec.stages, keys), jnp.int32)
  windowed = spec.window is not None
  ring = {
    'k_smem': block,
    'v_smem': block,
    'ends_smem': spots,
    'k_full': plgpu.Barrier(num_arrivals=3 if windowed else 2, num_barriers=spec.stages),
    'v_full': plgpu.Barrier(num_barriers=spec.stages),
    'free': plgpu.Barrier(num_arrivals=workers, num_barriers=spec.stages),
  }
  return ring | ({'positions_smem': spots} if windowed else {})


def _query_positions(spec, ref, row, q_first):
  """Of the queries of a warpgroup; None without a window."""
  if spec.window is None:
    return None
  return vector_over(0, ref['positions'].at[row, pl.ds(q_first, TILE)])


def _seen_by_rows(spec, ref, slot, q_first, kv_first, q_positions):
  """The mask of one step, queries by keys."""
  shape = (TILE, ref['k_smem'].shape[1])
  ends = vector_over(1, ref['ends_smem'].at[slot])
  kv_positions = None
  if spec.window is not None:
    kv_positions = vector_over(1, ref['positions_smem'].at[slot])
  return _seen(spec, shape, 0, q_first, kv_first, ends, q_positions, kv_positions)


def _forward_kernel(ref, *, spec, group):
  wg, row, head = lax.axis_index('wg'), lax.axis_index('row'), lax.axis_index('head')
  block = (
    ref['count'].shape[1] - 1 - lax.axis_index('block')
  )  # late queries see most: they go first
  own = pl.ds(block * spec.block_q + wg * TILE, TILE)
  q_first = ref['first_query'][0] + block * spec.block_q + wg * TILE
  q_smem, weights_smem = ref['q_smem'].at[wg], ref['weights_smem'].at[wg]
  ring = _Ring(
    spec.stages,
    ref['free'],
    functools.partial(_copy_keys, spec, ref, row, block, lax.div(head, group)),
    ref['whole'][row, block],
    ref['count'][row, block],
  )
  plgpu.copy_gmem_to_smem(ref['q'].at[row, own, head], q_smem, ref['q_full'].at[wg])
  q_positions = _query_positions(spec, ref, row, q_first)
  plgpu.barrier_wait(ref['q_full'].at[wg])

  def absorb(step, slot, state, masked):
    acc, top, total = state
    plgpu.barrier_wait(ref['k_full'].at[slot])
    scores, _ = scores_of(
      multiply(q_smem, ref['k_smem'].at[slot].transpose((1, 0))), spec.scale, spec.soft_cap
    )
    if masked:
      kv_first = _first_key(spec, ref, row, block, step)
      seen = _seen_by_rows(spec, ref, slot, q_first, kv_first, q_positions)
      scores = jnp.where(seen, scores, HIDDEN)
    new_top = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - spread(new_top, scores.shape, 0))
    total = total * shrink + weights.sum(axis=1)
    weights_smem[...] = weights.astype(weights_smem.dtype)
    plgpu.commit_smem()
    plgpu.barrier_wait(ref['v_full'].at[slot])
    values = multiply(weights_smem, ref['v_smem'].at[slot])
    return acc * spread(shrink, acc.shape, 0) + values, new_top, total

  if 'sinks' in ref:
    start = LOG2E * ref['sinks'][head], 1.0
  else:
    start = LOWEST, 0.0
  top, total = (
    plgpu.layout_cast(jnp.full((TILE,), x, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    for x in start
  )
  acc = plgpu.layout_cast(jnp.zeros(q_smem.shape, jnp.float32), plgpu.Layout.WGMMA)
  acc, top, total = ring.walk(absorb, (acc, top, total))
  total = jnp.where(total == 0.0, 1.0, total)  # a row that sees nobody gives 0
  q_smem[...] = (acc / spread(total, acc.shape, 0)).astype(q_smem.dtype)
  ref['lse_smem'].at[wg][...] = top / LOG2E + jnp.log(total)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(q_smem, ref['out'].at[row, own, head])
  plgpu.copy_smem_to_gmem(ref['lse_smem'].at[wg], ref['lse'].at[row, head, own])
  plgpu.wait_smem_to_gmem(0)


def _dq_kernel(ref, *, spec, group):
  wg, row, head = lax.axis_index('wg'), lax.axis_index('row'), lax.axis_index('head')
  block = ref['count'].shape[1] - 1 - lax.axis_index('block')
  parts = spec.block_kv // ref['k_smem'].shape[1]
  own = pl.ds(block * spec.block_q + wg * TILE, TILE)
  q_first = ref['first_query'][0] + block * spec.block_q + wg * TILE
  ring = _Ring(
    spec.stages,
    ref['free'],
    functools.partial(_copy_keys, spec, ref, row, block, lax.div(head, group)),
    parts * ref['whole'][row, block],
    parts * ref['count'][row, block],
  )
  full = ref['q_full'].at[wg]
  for name in ('q', 'do'):
    plgpu.copy_gmem_to_smem(ref[name].at[row, own, head], ref[f'{name}_smem'].at[wg], full)
  for name in ('lse', 'delta'):
    plgpu.copy_gmem_to_smem(ref[name].at[row, head, own], ref[f'{name}_smem'].at[wg], full)
  q_positions = _query_positions(spec, ref, row, q_first)
  plgpu.barrier_wait(full)
  q_smem, do_smem, d_smem = (ref[x].at[wg] for x in ('q_smem', 'do_smem', 'd_smem'))
  lse = LOG2E * vector_over(0, ref['lse_smem'].at[wg])
  delta = vector_over(0, ref['delta_smem'].at[wg])

  def walk(dq):
    def absorb(step, slot, state, masked):
      plgpu.barrier_wait(ref['k_full'].at[slot])
      plgpu.barrier_wait(ref['v_full'].at[slot])
      k_smem, v_smem = ref['k_smem'].at[slot], ref['v_smem'].at[slot]
      products, d_weights = multiply_pairs((q_smem, do_smem), (k_smem, v_smem))
      scores, tanh = scores_of(products, spec.scale, spec.soft_cap)
      weights = jnp.exp2(scores - spread(lse, scores.shape, 0))
      if masked:
        kv_first = _first_key(spec, ref, row, block, step)
        seen = _seen_by_rows(spec, ref, slot, q_first, kv_first, q_positions)
        weights = jnp.where(seen, weights, 0.0)
      d_scores = weights * (d_weights - spread(delta, scores.shape, 0))
      d_smem[...] = d_products(d_scores, tanh, spec.scale).astype(d_smem.dtype)
      plgpu.commit_smem()
      plgpu.wgmma(dq, d_smem, k_smem)
      plgpu.wgmma_wait(0)
      return state

    ring.walk(absorb, ())
    return dq[...]

  dq = pl.run_scoped(walk, plgpu.WGMMAAccumulatorRef(q_smem.shape, jnp.float32))
  q_smem[...] = dq.astype(q_smem.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(q_smem, ref['dq'].at[row, own, head])
  plgpu.wait_smem_to_gmem(0)


class _QueryStep(NamedTuple):
  """What a step of dk with dv takes: a query head, and the first of TILE queries."""

  head: jax.Array
  first: jax.Array


def _query_step(spec, ref, row, block, kv_head, group, step) -> _QueryStep:
  """All query heads of a block of the list, part by part, before the next block."""
  parts = spec.block_q // TILE
  inner = lax.rem(step, group * parts)
  listed = ref['listed'][row, block, lax.div(step, group * parts)]
  first = listed * spec.block_q + lax.rem(inner, parts) * TILE
  return _QueryStep(kv_head * group + lax.div(inner, parts), first)


def _copy_queries(spec, ref, row, step_of, step, slot):
  """Begins to copy what a step of dk with dv reads."""
  head, first = step_of(step)
  here, full = pl.ds(first, TILE), ref['full'].at[slot]
  for name in ('q', 'do'):
    plgpu.copy_gmem_to_smem(ref[name].at[row, here, head], ref[f'{name}_smem'].at[slot], full)
  for name in ('lse', 'delta'):
    plgpu.copy_gmem_to_smem(ref[name].at[row, head, here], ref[f'{name}_smem'].at[slot], full)
  if spec.window is not None:
    spots = pl.ds(ref['first_query'][0] + first, TILE)
    plgpu.copy_gmem_to_smem(ref['positions'].at[row, spots], ref['positions_smem'].at[slot], full)


def _dkv_kernel(ref, *, spec, group):
  wg, row, kv_head = lax.axis_index('wg'), lax.axis_index('row'), lax.axis_index('head')
  block = lax.axis_index('block')  # early keys are seen by most: they go first
  per_entry = group * (spec.block_q // TILE)
  step_of = functools.partial(_query_step, spec, ref, row, block, kv_head, group)
  ring = _Ring(
    spec.stages,
    ref['free'],
    functools.partial(_copy_queries, spec, ref, row, step_of),
    per_entry * ref['whole'][row, block],
    per_entry * ref['count'][row, block],
  )
  kv_first = block * spec.block_kv + wg * TILE
  own = pl.ds(kv_first, TILE)
  k_smem, v_smem = ref['k_smem'].at[wg], ref['v_smem'].at[wg]
  weights_smem, d_smem = ref['weights_smem'].at[wg], ref['d_smem'].at[wg]
  for name in ('k', 'v'):
    plgpu.copy_gmem_to_smem(
      ref[name].at[row, own, kv_head], ref[f'{name}_smem'].at[wg], ref['kv_full'].at[wg]
    )
  ends, kv_positions = vector_over(0, ref['ends'].at[row, own]), None
  if spec.window is not None:
    kv_positions = vector_over(0, ref['positions'].at[row, own])
  plgpu.barrier_wait(ref['kv_full'].at[wg])

  def seen_of(step, slot):
    # Keys by queries, so that lse and delta lie along the columns.
    q_first = ref['first_query'][0] + step_of(step).first
    q_positions = None
    if spec.window is not None:
      q_positions = vector_over(1, ref['positions_smem'].at[slot])
    return _seen(spec, (TILE, TILE), 1, q_first, kv_first, ends, q_positions, kv_positions)

  def walk(dk, dv):
    def absorb(step, slot, state, masked):
      plgpu.barrier_wait(ref['full'].at[slot])
      q_smem, do_smem = ref['q_smem'].at[slot], ref['do_smem'].at[slot]
      # One product after the other: the sums leave registers for one only.
      scores, tanh = scores_of(
        multiply(k_smem, q_smem.transpose((1, 0))), spec.scale, spec.soft_cap
      )
      lse = LOG2E * vector_over(1, ref['lse_smem'].at[slot])
      weights = jnp.exp2(scores - spread(lse, scores.shape, 1))
      if masked:
        weights = jnp.where(seen_of(step, slot), weights, 0.0)
      weights_smem[...] = weights.astype(weights_smem.dtype)
      slope = d_products(weights, tanh, spec.scale)
      delta = vector_over(1, ref['delta_smem'].at[slot])
      d_weights = multiply(v_smem, do_smem.transpose((1, 0)))
      d_scores = slope * (d_weights - spread(delta, scores.shape, 1))
      d_smem[...] = d_scores.astype(d_smem.dtype)
      plgpu.commit_smem()
      plgpu.wgmma(dv, weights_smem, do_smem)
      plgpu.wgmma(dk, d_smem, q_smem)
      plgpu.wgmma_wait(0)
      return state

    ring.walk(absorb, ())
    return dk[...], dv[...]

  acc = plgpu.WGMMAAccumulatorRef(k_smem.shape, jnp.float32)
  dk, dv = pl.run_scoped(walk, acc, acc)
  k_smem[...] = dk.astype(k_smem.dtype)
  v_smem[...] = dv.astype(v_smem.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(k_smem, ref['dk'].at[row, own, kv_head])
  plgpu.copy_smem_to_gmem(v_smem, ref['dv'].at[row, own, kv_head])
  plgpu.wait_smem_to_gmem(0)


def _inputs(spec, q, k, v, tree, runs):
  inputs = {'q': q, 'k': k, 'v': v, 'ends': tree.subtree_end}
  if spec.window is not None:
    inputs['positions'] = tree.positions
  return inputs | {'first_query': tree.first_query} | runs._asdict()


def _forward(spec, q, k, v, sinks, tree):
  """Returns out like q and lse, float32 [R, H, Q]."""
  rows, tokens, heads, head_dim = q.shape
  workers = spec.block_q // TILE
  inputs = _inputs(spec, q, k, v, tree, tree.tables.by_query)
  if sinks is not None:
    inputs['sinks'] = sinks.astype(jnp.float32)
  outputs = {
    'out': jax.ShapeDtypeStruct(q.shape, q.dtype),
    'lse': jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32),
  }
  scratch = _key_ring(spec, k.dtype, spec.block_kv, head_dim, workers) | {
    'q_smem': plgpu.SMEM((workers, TILE, head_dim), q.dtype),
    'weights_smem': plgpu.SMEM((workers, TILE, spec.block_kv), q.dtype),
    'lse_smem': plgpu.SMEM((workers, TILE), jnp.float32),
    'q_full': plgpu.Barrier(num_barriers=workers),
  }
  return launch(
    'tree_attention',
    functools.partial(_forward_kernel, spec=spec, group=heads // k.shape[2]),
    inputs=inputs,
    outputs=outputs,
    scratch=scratch,
    grid={'head': heads, 'block': tokens // spec.block_q, 'row': rows},
    warpgroups=workers,
    interpret=spec.interpret,
  )


def _d_queries(spec, q, k, v, do, lse, delta, tree):
  rows, tokens, heads, head_dim = q.shape
  workers = spec.block_q // TILE
  inputs = _inputs(spec, q, k, v, tree, tree.tables.by_query)
  inputs |= {'do': do, 'lse': lse, 'delta': delta}
  outputs = {'dq': jax.ShapeDtypeStruct(q.shape, q.dtype)}
  tile = plgpu.SMEM((workers, TILE, head_dim), q.dtype)
  numbers = plgpu.SMEM((workers, TILE), jnp.float32)
  scratch = _key_ring(spec, k.dtype, TILE, head_dim, workers) | {
    'q_smem': tile,
    'do_smem': tile,
    'd_smem': plgpu.SMEM((workers, TILE, TILE), q.dtype),
    'lse_smem': numbers,
    'delta_smem': numbers,
    'q_full': plgpu.Barrier(num_arrivals=4, num_barriers=workers),
  }
  (dq,) = launch(
    'tree_attention_dq',
    functools.partial(_dq_kernel, spec=spec, group=heads // k.shape[2]),
    inputs=inputs,
    outputs=outputs,
    scratch=scratch,
    grid={'head': heads, 'block': tokens // spec.block_q, 'row': rows},
    warpgroups=workers,
    interpret=spec.interpret,
  )
  return dq


def _d_keys(spec, q, k, v, do, lse, delta, tree):
  rows, tokens, kv_heads, head_dim = k.shape
  workers = spec.block_kv // TILE
  inputs = _inputs(spec, q, k, v, tree, tree.tables.by_key)
  inputs |= {'do': do, 'lse': lse, 'delta': delta}
  outputs = {'dk': jax.ShapeDtypeStruct(k.shape, k.dtype)}
  outputs |= {'dv': jax.ShapeDtypeStruct(v.shape, v.dtype)}
  of_keys = plgpu.SMEM((workers, TILE, head_dim), k.dtype)
  square = plgpu.SMEM((workers, TILE, TILE), k.dtype)
  of_queries = plgpu.SMEM((spec.stages, TILE, head_dim), q.dtype)
  numbers = plgpu.SMEM((spec.stages, TILE), jnp.float32)
  windowed = spec.window is not None
  scratch = {
    'k_smem': of_keys,
    'v_smem': of_keys,
    'weights_smem': square,
    'd_smem': square,
    'q_smem': of_queries,
    'do_smem': of_queries,
    'lse_smem': numbers,
    'delta_smem': numbers,
    'kv_full': plgpu.Barrier(num_arrivals=2, num_barriers=workers),
    'full': plgpu.Barrier(num_arrivals=5 if windowed else 4, num_barriers=spec.stages),
    'free': plgpu.Barrier(num_arrivals=workers, num_barriers=spec.stages),
  }
  if windowed:
    scratch['positions_smem'] = plgpu.SMEM((spec.stages, TILE), jnp.int32)
  return launch(
    'tree_attention_dkv',
    functools.partial(_dkv_kernel, spec=spec, group=q.shape[2] // kv_heads),
    inputs=inputs,
    outputs=outputs,
    scratch=scratch,
    grid={'head': kv_heads, 'block': tokens // spec.block_kv, 'row': rows},
    warpgroups=workers,
    interpret=spec.interpret,
  )
