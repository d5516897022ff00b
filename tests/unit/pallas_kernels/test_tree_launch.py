"""The walk of the TPU kernels over block pairs: a kernel that counts what every query sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from rlax_stack.pallas_kernels import block_tables, tree_launch
from rlax_stack.pallas_kernels.tree_launch import Places, TpuSpec, Tree


def _count_kernel(pairs, counts, origin, q_ref, kv_ref, ends_ref, *refs, spec, capacity):
  *positions, out_ref = refs
  step = tree_launch.step_of(pairs, counts, origin, capacity, block_tables.q_block_of)
  shape = (q_ref.shape[3], kv_ref.shape[2])

  @pl.when(step.active & step.first)
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)

  def seen():
    spots = [x[0] for x in positions] or [None, None]
    return tree_launch.visible(spec, step, shape, ends_ref[0], *spots, transposed=False)

  def absorb(mask):
    ones = jnp.ones(shape, jnp.float32)
    number = (ones if mask is None else jnp.where(mask, ones, 0)).sum(-1)
    out_ref[0, 0, 0, 0] += number

  tree_launch.by_kind(step, seen, absorb)


@pytest.mark.parametrize('window', [None, 60])
@pytest.mark.parametrize('first_query', [0, 128])
def test_every_query_meets_each_key_that_it_sees_once(window, first_query):
  tokens, kv_heads, group = 256, 2, 3
  ends = np.repeat([256, 140, 256], [100, 40, 116]).astype(np.int32)
  positions = np.concatenate([np.arange(140), 100 + np.arange(116)]).astype(np.int32)
  index = np.arange(tokens)
  dense = (index[None] <= index[:, None]) & (index[:, None] < ends[None])
  if window is not None:
    dense &= positions[:, None] - positions[None] < window
  spec = TpuSpec(1.0, window, None, 64, 32, 1 << 24, interpret=True)
  ends, positions = jnp.asarray(ends)[None], jnp.asarray(positions)[None]
  kinds = block_tables.block_kinds(positions, ends, block_q=64, block_kv=32, window=window)
  kinds = kinds[:, first_query // 64 :]
  listed = block_tables.block_list(kinds)
  tables = block_tables.BlockTables(listed, listed)
  tree = Tree(positions, ends, jnp.int32(first_query), tables)
  q = jnp.zeros((1, kv_heads, kinds.shape[1], group * 64, 8))
  k = jnp.zeros((1, kv_heads, tokens, 8))
  size = tree_launch.sizes_of(q, k, spec)
  assert size == (1, kv_heads, group, tokens, 8)
  specs = tree_launch.block_specs(spec, size, Places(listed.capacity))
  masks, mask_specs = tree_launch.mask_inputs(spec, specs, tree)
  assert len(masks) == (1 if window is None else 3)
  (out,) = tree_launch.launch(
    'count',
    spec,
    _count_kernel,
    size,
    tree,
    listed,
    [q, k, *masks],
    [specs['q'], specs['kv'], *mask_specs],
    (jax.ShapeDtypeStruct((*q.shape[:3], 1, group * 64), jnp.float32),),
    [specs['per_q']],
    [],
    2,
  )
  want = dense.sum(1)[first_query:].reshape(-1, 1, 64)
  got = np.asarray(out).reshape(kv_heads, kinds.shape[1], group, 64)
  np.testing.assert_array_equal(got, np.broadcast_to(want[None], got.shape))


def test_steps_past_the_end_stay_where_they_are():
  """Rows have lists of different lengths; the shorter one fetches nothing while the longer one goes on."""
  listed = block_tables.block_list(jnp.asarray([[[1, 0], [2, 1]], [[1, 0], [0, 0]]], jnp.int8))
  places, pairs = Places(listed.capacity), listed.packed.reshape(-1)
  arguments = (pairs, listed.count, jnp.asarray([5]))
  assert listed.count.tolist() == [3, 1]
  assert [int(places.q_rows(0, 0, i, *arguments)[2]) for i in range(4)] == [0, 1, 1, 1]
  assert [int(places.kv_rows(0, 0, i, *arguments)[2]) for i in range(4)] == [0, 0, 1, 1]
  assert [int(places.kv_lane(1, 0, i, *arguments)[2]) for i in range(3)] == [0, 0, 0]
  assert [int(places.q_lane(0, 0, i, *arguments)[2]) for i in range(3)] == [5, 6, 6]
