"""How the TPU kernels of tree attention find their way: a grid over lists of block pairs, block specs, the mask.

Not for what a kernel computes (`tree_attention_tpu`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rlax_stack.pallas_kernels import block_tables
from rlax_stack.pallas_kernels.tpu_blocks import column

_SEMANTICS = ('parallel', 'parallel', 'arbitrary')


class TpuSpec(NamedTuple):
  """What is static about a call; hashable.

  pairs: block pairs per row and key head that the cost estimate counts; 0 for as many as there can be.
  interpret: False, True, or pltpu.InterpretParams.
  """

  scale: float
  window: int | None
  soft_cap: float | None
  block_q: int
  block_kv: int
  vmem_limit: int
  pairs: int = 0
  interpret: Any = False


class Call(NamedTuple):
  """Sizes of one call."""

  rows: int
  kv_heads: int
  group: int
  tokens: int
  head_dim: int

  def lanes(self, spec: TpuSpec) -> int:
    """Rows of a query block: its tokens, once for each query head of the key head."""
    return self.group * spec.block_q


class Tree(NamedTuple):
  """The integers of the mask and the block pairs to visit."""

  positions: jax.Array  # int32 [R, T]
  subtree_end: jax.Array  # int32 [R, T]
  first_query: jax.Array  # int32 scalar
  tables: block_tables.BlockTables


class Places(NamedTuple):
  """How a step finds its blocks; index maps take (row, key head, step, pairs, counts, origin)."""

  capacity: int

  def of(self, row, step, pairs, counts):
    """The packed pair of a step; steps past the end stay at the last one, so that nothing is fetched."""
    last = jnp.maximum(counts[row] - 1, 0)
    return pairs[row * self.capacity + jnp.minimum(step, last)]

  def q_rows(self, row, head, step, pairs, counts, origin):
    """Block of arrays [R, K, query blocks, ...]."""
    del origin
    return row, head, block_tables.q_block_of(self.of(row, step, pairs, counts)), 0, 0

  def kv_rows(self, row, head, step, pairs, counts, origin):
    """Block of arrays [R, K, T, Dh]."""
    del origin
    return row, head, block_tables.kv_block_of(self.of(row, step, pairs, counts)), 0

  def q_lane(self, row, head, step, pairs, counts, origin):
    """Block of arrays [R, 1, T], at the queries: `origin` is their first block in the row."""
    del head
    return row, 0, origin[0] + block_tables.q_block_of(self.of(row, step, pairs, counts))

  def kv_lane(self, row, head, step, pairs, counts, origin):
    """Block of arrays [R, 1, T], at the keys."""
    del head, origin
    return row, 0, block_tables.kv_block_of(self.of(row, step, pairs, counts))


class Step(NamedTuple):
  """Where a kernel stands: the pair's kind and blocks, and whether it begins or ends its run of steps."""

  active: jax.Array
  kind: jax.Array
  q_block: jax.Array  # in the row, not among the queries at hand
  kv_block: jax.Array
  first: jax.Array
  last: jax.Array


def step_of(pairs, counts, origin, capacity, run_of) -> Step:
  """The step that the grid is at; `run_of` tells the block that a run of steps adds up into."""
  row, step = pl.program_id(0), pl.program_id(2)
  count, base = counts[row], row * capacity
  here = pairs[base + jnp.minimum(step, capacity - 1)]
  before = pairs[base + jnp.clip(step - 1, 0, capacity - 1)]
  after = pairs[base + jnp.minimum(step + 1, capacity - 1)]
  return Step(
    active=step < count,
    kind=block_tables.kind_of(here),
    q_block=origin[0] + block_tables.q_block_of(here),
    kv_block=block_tables.kv_block_of(here),
    first=(step == 0) | (run_of(before) != run_of(here)),
    last=(step == count - 1) | (run_of(after) != run_of(here)),
  )


def visible(spec, step, shape, ends, q_positions, kv_positions, *, transposed):
  """bool of `shape`, [queries, keys] or transposed: the rule, for the tokens of one pair of blocks.

  `ends` and `kv_positions` are rows [1, keys], `q_positions` is [1, block_q]; a query row's token is its place
  modulo block_q.
  """
  q_axis, kv_axis = (1, 0) if transposed else (0, 1)
  inner = lax.broadcasted_iota(jnp.int32, shape, q_axis) & (spec.block_q - 1)
  q_index = step.q_block * spec.block_q + inner
  kv_index = step.kv_block * spec.block_kv + lax.broadcasted_iota(jnp.int32, shape, kv_axis)
  ends = column(ends)[:, :1] if transposed else ends
  seen = (kv_index <= q_index) & (q_index < ends)
  if spec.window is not None:
    repeats = shape[q_axis] // spec.block_q
    q_row = jnp.concatenate([q_positions] * repeats, axis=1)
    q_side = q_row if transposed else column(q_row)[:, :1]
    kv_side = column(kv_positions)[:, :1] if transposed else kv_positions
    seen = seen & (q_side - kv_side < spec.window)
  return seen


def by_kind(step, seen, absorb):
  """Runs `absorb(mask or None)`: whole blocks without a mask, partial ones with it."""

  @pl.when(step.active & (step.kind == block_tables.FULL))
  def _():
    absorb(None)

  @pl.when(step.active & (step.kind == block_tables.PARTIAL))
  def _():
    absorb(seen())


def sizes_of(q, k, spec) -> Call:
  """Sizes of folded queries [R, K, T / block_q, rows, Dh] and keys [R, K, T, Dh]."""
  rows, kv_heads, tokens, head_dim = k.shape
  return Call(rows, kv_heads, q.shape[3] // spec.block_q, tokens, head_dim)


def launch(
  name, spec, kernel, size, tree, listed, inputs, in_specs, outputs, out_specs, scratch, products
):
  """One pallas_call over a list of pairs."""
  counted = spec.pairs or listed.capacity
  visits, lanes = size.rows * size.kv_heads * counted, size.lanes(spec)
  tile = lanes * spec.block_kv
  origin = (tree.first_query // spec.block_q).reshape(1)
  moved = sum(x.size * x.dtype.itemsize for x in (*inputs, *outputs))
  return pl.pallas_call(
    functools.partial(kernel, spec=spec, capacity=listed.capacity),
    out_shape=outputs,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(size.rows, size.kv_heads, jnp.maximum(jnp.max(listed.count), 1)),
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch,
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=_SEMANTICS, vmem_limit_bytes=spec.vmem_limit
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * products * visits * tile * size.head_dim,
      transcendentals=visits * tile,
      bytes_accessed=moved,
    ),
    interpret=spec.interpret,
    name=name,
  )(listed.packed.reshape(-1), listed.count, origin, *inputs)


def block_specs(spec, size, places):
  """Block specs by name."""
  lanes = size.lanes(spec)
  return {
    'q': pl.BlockSpec((1, 1, 1, lanes, size.head_dim), places.q_rows),
    'kv': pl.BlockSpec((1, 1, spec.block_kv, size.head_dim), places.kv_rows),
    'per_q': pl.BlockSpec((1, 1, 1, 1, lanes), places.q_rows),
    'q_lane': pl.BlockSpec((1, 1, spec.block_q), places.q_lane),
    'kv_lane': pl.BlockSpec((1, 1, spec.block_kv), places.kv_lane),
  }


def mask_inputs(spec, specs, tree):
  """What the mask is made of, with its block specs: subtree ends, and with a window both positions."""
  arrays, chosen = [tree.subtree_end[:, None]], [specs['kv_lane']]
  if spec.window is not None:
    arrays += [tree.positions[:, None], tree.positions[:, None]]
    chosen += [specs['q_lane'], specs['kv_lane']]
  return arrays, chosen
