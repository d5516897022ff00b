"""The Hopper kernels of tree attention in the GPU interpreter, against the dense reference; and lowered for CUDA.

The interpreter starts memory as NaN, raises on reads outside of it and, where asked, on races between warpgroups and
copies. Lowering for CUDA needs no GPU: it settles layouts of registers and shared memory.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlax_stack import sharding
from rlax_stack.pallas_kernels import dispatch, tree_attention, tree_rows
from rlax_stack.pallas_kernels.block_tables import EMPTY, FULL, PARTIAL
from rlax_stack.pallas_kernels.gpu_tiles import TILE
from rlax_stack.pallas_kernels.tree_attention_gpu import (
  GpuSpec,
  GpuTables,
  Runs,
  attend,
  make_tables,
)

pytestmark = pytest.mark.skipif(
  not hasattr(plgpu, 'InterpretGPUParams'), reason='the GPU interpreter came with jax 0.12'
)
HOPPER = types.SimpleNamespace(platform='gpu', compute_capability='9.0', device_kind='NVIDIA H100')


def _row(trees, tokens):
  """Positions and ends of a row of (prompt, suffixes) groups, padded to `tokens`."""
  positions, ends = [], []
  for prompt, suffixes in trees:
    start = len(ends)
    end = start + prompt + sum(suffixes)
    positions.extend(range(prompt))
    ends.extend([end] * prompt)
    for suffix in suffixes:
      positions.extend(range(prompt, prompt + suffix))
      ends.extend([len(ends) + suffix] * suffix)
  padding = range(len(ends) + 1, tokens + 1)
  return np.array(positions + [0] * len(padding), np.int32), np.array([*ends, *padding], np.int32)


def _inputs(rows, heads, kv_heads, width, with_sinks=False):
  rng = np.random.default_rng(0)
  positions, ends = (jnp.asarray(np.stack(x)) for x in zip(*rows, strict=True))

  def draw(count):
    return jnp.asarray(rng.standard_normal((*positions.shape, count, width)), jnp.bfloat16)

  q, k, v, cotangent = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
  sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32) if with_sinks else None
  return q, k, v, sinks, positions, ends, cotangent


def _spec(width, **options):
  options = {'window': None, 'soft_cap': None} | options
  return GpuSpec(width**-0.5, **options)


@functools.partial(jax.jit, static_argnames=('spec', 'dense'))
def _value_and_grads(q, k, v, sinks, positions, ends, cotangent, *, spec, dense=False):
  parts = ((lambda spec, kinds: ()), tree_rows.dense) if dense else (make_tables, attend)
  kernel = tree_rows.Kernel(spec, spec.block_q, spec.block_kv, *parts)

  def run(q, k, v, sinks):
    layout = tree_rows.lay_out(kernel, positions, ends)
    return tree_rows.attend_rows(kernel, layout, q, k, v, sinks)

  out, pull = jax.vjp(run, q, k, v, sinks)
  return jax.tree.leaves((out, pull(cotangent)))


def _interpreted(inputs, spec, **options):
  spec = spec._replace(interpret=plgpu.InterpretGPUParams(**options))
  return _value_and_grads(*inputs, spec=spec)


def _check(got, inputs, spec):
  """Against the float32 reference at most twice the error of the reference in bfloat16."""
  half = _value_and_grads(*inputs, spec=spec, dense=True)
  whole = [x.astype(jnp.float32) if x is not None and x.ndim == 4 else x for x in inputs]
  exact = _value_and_grads(*whole, spec=spec, dense=True)
  for ours, theirs, want in zip(got, half, exact, strict=True):
    assert ours.dtype == theirs.dtype
    error, allowed = (np.asarray(x, np.float64) - np.asarray(want) for x in (ours, theirs))
    assert np.isfinite(error).all()
    assert np.sqrt((error**2).mean()) <= 2 * np.sqrt((allowed**2).mean())
    assert np.abs(error).max() <= 2e-2 * max(1.0, float(np.abs(want).max()))


_ONE = [_row([(150, [60, 20, 1])], 256)]
_TWO = [_row([(140, [30, 9, 50])], 256), _row([(100, [28]), (40, [33, 1])], 256)]
_SMALL = [_row([(70, [30, 9])], 128)]
_NARROW = {
  'block_q': TILE,
  'block_kv': TILE,
}  # one warpgroup, which the interpreter compiles sooner
_CASES = {
  'a head each, pairs that are empty, padding': (_TWO, (1, 1, 64), {}),
  'four query heads to a key head, window, soft cap, sinks': (
    _ONE,
    (4, 1, 64),
    {'window': 100, 'soft_cap': 5.0},
  ),
  'eight query heads to a key head': (_SMALL, (8, 1, 64), _NARROW),
  'width 128, window': (_SMALL, (2, 2, 128), {'window': 30, **_NARROW}),
}


@pytest.mark.parametrize('name', [*_CASES])
def test_output_and_gradients_equal_reference(name):
  rows, sizes, options = _CASES[name]
  inputs = _inputs(rows, *sizes, with_sinks='sinks' in name)
  spec = _spec(sizes[2], **options)
  _check(_interpreted(inputs, spec, detect_races='padding' in name), inputs, spec)


def test_nan_in_padding_reaches_nothing():
  inputs, spec = list(_inputs([_row([(50, [20, 15])], 128)], 1, 1, 64)), _spec(64, **_NARROW)
  inputs[6] = inputs[6].at[:, 85:].set(0)
  clean = _interpreted(inputs, spec)
  for i in range(3):
    inputs[i] = inputs[i].at[:, 85:].set(jnp.nan)
  poisoned = _interpreted(inputs, spec)
  for x, y in zip(clean, poisoned, strict=True):
    np.testing.assert_array_equal(x[:, :85], y[:, :85])


def test_a_part_of_the_queries_gets_what_the_whole_row_does():
  """As where the tokens of a row lie over devices: the second half of the queries, all of the keys."""
  *arrays, _, positions, ends, cotangent = _inputs(_SMALL, 1, 1, 64)
  spec = _spec(64, interpret=plgpu.InterpretGPUParams(), **_NARROW)

  def late(parts, first, queries):
    kernel = tree_rows.Kernel(spec, *parts)
    layout = tree_rows.lay_out(kernel, positions, ends, first, queries)

    def run(q, k, v):
      return tree_rows.attend_rows(kernel, layout, q, k, v, None)[:, -TILE:]

    q, k, v = arrays
    out, pull = jax.vjp(run, q[:, first:], k, v)
    d_q, d_k, d_v = pull(cotangent[:, TILE:])
    return out, d_q[:, -TILE:], d_k, d_v

  found = jax.jit(lambda: late((TILE, TILE, make_tables, attend), TILE, TILE))()
  wanted = jax.jit(lambda: late((1, 1, lambda spec, kinds: (), tree_rows.dense), 0, None))()
  for got, want in zip(found, wanted, strict=True):
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=4e-2)


def test_lists_hold_whole_blocks_first():
  kinds = jnp.asarray([[[PARTIAL, EMPTY, EMPTY], [FULL, PARTIAL, EMPTY], [PARTIAL, EMPTY, FULL]]])
  tables = make_tables(_spec(64), kinds.astype(jnp.int8))
  assert isinstance(tables, GpuTables) and isinstance(tables.by_key, Runs)
  assert tables.by_query.whole.tolist() == [[0, 1, 1]]
  assert tables.by_query.count.tolist() == [[1, 2, 2]]
  assert tables.by_query.listed[0, 2, :2].tolist() == [2, 0]
  assert tables.by_key.listed[0, 0].tolist() == [1, 0, 2]
  assert tables.by_key.count.tolist() == [[3, 1, 1]]


def _on_hopper(monkeypatch):
  monkeypatch.setattr(dispatch, 'target_device', lambda mesh: HOPPER)


def test_pallas_on_hopper_is_this_kernel_and_auto_is_xla(monkeypatch):
  _on_hopper(monkeypatch)
  q, k, v, _, positions, ends, _ = _inputs([_row([(100, [20, 5])], 128)], 1, 1, 64)

  def run(implementation):
    attend = functools.partial(tree_attention.tree_attention, implementation=implementation)
    return jax.jit(attend).trace(q, k, v, positions, ends)

  calls = {
    name: run(name).lower(lowering_platforms=('cuda',)).as_text().count('@mosaic_gpu_v2')
    for name in ('auto', 'xla', 'pallas')
  }
  assert calls == {'auto': 0, 'xla': 0, 'pallas': 1}


def test_what_it_has_not_is_refused_with_the_reason(monkeypatch):
  _on_hopper(monkeypatch)
  q, k, v, _, positions, ends, _ = _inputs(_ONE, 1, 1, 64)
  with pytest.raises(ValueError, match='for bfloat16, and this is float32'):
    whole = (x.astype(jnp.float32) for x in (q, k, v))
    tree_attention.tree_attention(*whole, positions, ends, implementation='pallas')
  wide = (jnp.tile(x, (1, 1, 1, 4)) for x in (q, k, v))
  with pytest.raises(ValueError, match='heads of width 64 and 128, and this is 256'):
    tree_attention.tree_attention(*wide, positions, ends, implementation='pallas')


@pytest.mark.parametrize('split', [False, True])
@pytest.mark.parametrize('width', [64, 128])
def test_lowers_for_cuda(width, split, monkeypatch):
  """Mosaic GPU takes every kernel: its layouts of registers and shared memory fit together."""
  _on_hopper(monkeypatch)
  mesh = sharding.make_mesh({'tensor': 2}, jax.devices()[:2]) if split else None
  options = {'window': 100, 'soft_cap': 5.0} if split else {}
  q, k, v, sinks, positions, ends, _ = _inputs(_TWO, 4, 2, width, with_sinks=split)

  def step(q, k, v, sinks):
    def run(*arrays):
      return tree_attention.tree_attention(
        *arrays, positions, ends, sinks=sinks, mesh=mesh, implementation='pallas', **options
      )

    out, pull = jax.vjp(run, q, k, v)
    return out, pull(out)

  lowered = jax.jit(step).trace(q, k, v, sinks).lower(lowering_platforms=('cuda',))
  assert lowered.as_text().count('@mosaic_gpu_v2') == 3
