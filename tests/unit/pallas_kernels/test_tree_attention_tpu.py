"""The TPU kernels of tree attention in interpret mode, against the dense reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rlax_stack.pallas_kernels import tree_attention_tpu, tree_rows
from rlax_stack.pallas_kernels.tree_launch import TpuSpec

# Memory starts as NaN, reads outside of it raise, and races between kernels' copies are found.
STRICT = pltpu.InterpretParams(
  uninitialized_memory='nan', out_of_bounds_reads='raise', detect_races=True
)


def _group(prompt, suffixes, tokens):
  """Positions and ends of a prompt with its suffixes; a suffix may be a list: (its length, its suffixes)."""
  positions, ends = [], []

  def walk(node, depth):
    length, children = node if isinstance(node, tuple) else (node, [])
    start = len(positions)
    positions.extend(range(depth, depth + length))
    ends.extend([0] * length)
    for child in children:
      walk(child, depth + length)
    ends[start : start + length] = [len(positions)] * length

  walk((prompt, suffixes), 0)
  padding = range(len(ends) + 1, tokens + 1)
  return np.array(positions + [0] * len(padding), np.int32), np.array([*ends, *padding], np.int32)


@functools.partial(jax.jit, static_argnames=('spec', 'dense'))
def _value_and_grads(q, k, v, sinks, positions, ends, cotangent, *, spec, dense=False):
  if dense:
    parts = (lambda spec, kinds: ()), tree_rows.dense
  else:
    parts = tree_attention_tpu.make_tables, tree_attention_tpu.attend
  kernel = tree_rows.Kernel(spec, spec.block_q, spec.block_kv, *parts)

  def attend(q, k, v, sinks):
    layout = tree_rows.lay_out(kernel, positions, ends)
    return tree_rows.attend_rows(kernel, layout, q, k, v, sinks)

  out, pull = jax.vjp(attend, q, k, v, sinks)
  return jax.tree.leaves((out, pull(cotangent)))


def _inputs(layouts, heads, kv_heads, width, dtype=jnp.float32, with_sinks=False, seed=0):
  rng = np.random.default_rng(seed)
  positions, ends = (jnp.asarray(np.stack(x)) for x in zip(*layouts, strict=True))

  def draw(count):
    return jnp.asarray(rng.standard_normal((*positions.shape, count, width)), dtype)

  q, k, v, cotangent = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
  sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32) if with_sinks else None
  return q, k, v, sinks, positions, ends, cotangent


def _spec(width, block_q=128, block_kv=128, **options):
  options = {'window': None, 'soft_cap': None, 'interpret': True} | options
  return TpuSpec(
    scale=width**-0.5, block_q=block_q, block_kv=block_kv, vmem_limit=1 << 26, **options
  )


def _check(inputs, spec, tolerance=2e-5):
  got = _value_and_grads(*inputs, spec=spec)
  want = _value_and_grads(*inputs, spec=spec, dense=True)
  for x, y in zip(got, want, strict=True):
    assert np.isfinite(np.asarray(x, np.float32)).all()
    np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


_TREES = [_group(150, [(60, [9, 30]), 117], 512), _group(300, [40, 1, 100], 512)]
_CASES = {
  'plain': ((4, 2, 64), {}),
  'one key head, window, soft cap, sinks': (
    (4, 1, 64),
    {'window': 100, 'soft_cap': 5.0, 'block_kv': 256},
  ),
  'seven query heads to a key head': ((7, 1, 64), {'block_kv': 256}),
  'a head each, wide blocks of queries': ((2, 2, 128), {'window': 70, 'block_q': 256}),
  'width 256': ((2, 1, 256), {'block_q': 256, 'block_kv': 256}),
}


@pytest.mark.parametrize('name', [*_CASES])
def test_equals_reference(name):
  sizes, options = _CASES[name]
  inputs = _inputs(_TREES, *sizes, with_sinks='sinks' in name)
  _check(inputs, _spec(sizes[2], **options))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['plain', 'one key head, window, soft cap, sinks'])
def test_reads_nothing_uninitialised_out_of_bounds_or_in_a_race(name):
  sizes, options = _CASES[name]
  # The second row has blocks that nothing visits: what is left there must not get out.
  layouts = [_TREES[0], _group(100, [20], 512)]
  inputs = _inputs(layouts, *sizes, with_sinks='sinks' in name)
  _check(inputs, _spec(sizes[2], interpret=STRICT, **options))


def test_bfloat16_errors_are_those_of_its_products():
  """Against the float32 reference at most twice the error of the reference in bfloat16."""
  inputs = _inputs(_TREES, 4, 2, 64, dtype=jnp.bfloat16)
  exact = _value_and_grads(
    *(x if x is None or x.ndim < 4 else x.astype(jnp.float32) for x in inputs),
    spec=_spec(64),
    dense=True,
  )
  got = _value_and_grads(*inputs, spec=_spec(64))
  dense = _value_and_grads(*inputs, spec=_spec(64), dense=True)

  def error(x, y):
    return float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32) - y))))

  for ours, theirs, want in zip(got, dense, exact, strict=True):
    assert ours.dtype == jnp.bfloat16
    assert error(ours, want) <= 2 * error(theirs, want)


def test_nan_in_padding_reaches_nothing():
  inputs = list(_inputs([_group(100, [30, 20], 256)], 2, 1, 64))
  inputs[6] = inputs[6].at[:, 150:].set(0)
  clean = _value_and_grads(*inputs, spec=_spec(64))
  for i in range(3):
    inputs[i] = inputs[i].at[:, 150:].set(jnp.nan)
  dirty = _value_and_grads(*inputs, spec=_spec(64))
  np.testing.assert_array_equal(clean[0][:, :150], dirty[0][:, :150])
  for x, y in zip(clean[1:], dirty[1:], strict=True):
    np.testing.assert_array_equal(x, y)


def test_the_same_bits_every_time():
  """A prompt's gradient adds up over its suffixes in the order of the row, without atomics."""
  inputs = _inputs(_TREES, 4, 2, 64)
  first, second = (_value_and_grads(*inputs, spec=_spec(64)) for _ in range(2))
  for x, y in zip(first, second, strict=True):
    np.testing.assert_array_equal(x, y)


def test_fold_and_unfold():
  x = jnp.arange(2 * 8 * 6 * 3, dtype=jnp.float32).reshape(2, 8, 6, 3)
  folded = tree_attention_tpu.fold(x, 2, 4)
  assert folded.shape == (2, 2, 2, 12, 3)
  # Row 1, key head 1, block 1: query heads 3, 4, 5 of tokens 4 to 7, one head after another.
  np.testing.assert_array_equal(folded[1, 1, 1, :4], x[1, 4:8, 3])
  np.testing.assert_array_equal(folded[1, 1, 1, 8:], x[1, 4:8, 5])
  np.testing.assert_array_equal(tree_attention_tpu.unfold(folded, 3, 4), x)
