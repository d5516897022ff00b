"""Quantised kernels: how far they are from the weights, and that products are those of the weights they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models.quantised import (
  KERNEL_KINDS,
  QuantisedKernel,
  columns_product,
  quantise_kernel,
  quantise_lines,
  rows_product,
)

_EXACT = sorted(
  kind for kind, (_, round_activations) in KERNEL_KINDS.items() if not round_activations
)


def _kernel(*shape):
  """Channels of very different size, one of them all zero."""
  random = np.random.default_rng(0)
  sizes = np.geomspace(1e-3, 10.0, shape[-2])
  kernel = random.normal(size=shape) * sizes[:, None]
  kernel[..., 1, :] = 0.0
  return kernel.astype(np.float32)


def _largest(kernel):
  return np.abs(kernel.astype(np.float64)).max(-1)


@pytest.mark.parametrize('shape', [(6, 40), (3, 6, 40)])
def test_int8_is_within_half_a_step_of_every_weight(shape):
  kernel = _kernel(*shape)
  got = quantise_kernel(jnp.asarray(kernel), 'int8')
  assert got.values.dtype == jnp.int8 and not got.round_activations
  want = np.where(_largest(kernel) > 0, _largest(kernel) / 127, 1.0)
  np.testing.assert_allclose(got.scales, want, rtol=1e-6)
  error = np.abs(np.asarray(got.dequantised(), np.float64) - kernel)
  assert (error <= 0.5 * (1 + 1e-5) * want[..., None]).all()
  assert error.max() > 0


def test_fp8_is_within_a_sixteenth_of_every_weight():
  kernel = _kernel(6, 40)
  got = quantise_kernel(jnp.asarray(kernel), 'fp8')
  assert got.values.dtype == jnp.float8_e4m3fn
  scales = np.where(_largest(kernel) > 0, _largest(kernel) / 448.0, 1.0).astype(np.float32)
  np.testing.assert_allclose(got.scales, scales, rtol=1e-6)
  error = np.abs(np.asarray(got.dequantised(), np.float64) - kernel)
  assert (error <= np.maximum(np.abs(kernel) / 16, scales[:, None] * 2**-10) * (1 + 1e-5)).all()


@pytest.mark.parametrize('kind', _EXACT)
def test_products_are_those_of_the_weights_it_stands_for(kind):
  kernel = quantise_kernel(jnp.asarray(_kernel(6, 40)), kind)
  x = np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32)
  want = np.asarray(kernel.dequantised(), np.float64) @ x
  scale = np.abs(want).max(1, keepdims=True) + 1e-9  # each channel against its own size
  columns, rows = columns_product(kernel, jnp.asarray(x)), rows_product(jnp.asarray(x.T), kernel)
  assert (np.abs(columns - want) / scale).max() < 1e-5
  assert (np.abs(rows.T - want) / scale).max() < 1e-5
  short = jnp.asarray(x, jnp.bfloat16)
  assert columns_product(kernel, short).dtype == rows_product(short.T, kernel).dtype == short.dtype
  # bfloat16 holds every int8 and fp8 value: only activations and the result are rounded.
  want = np.asarray(kernel.dequantised(), np.float64) @ np.asarray(short, np.float64)
  got = np.asarray(columns_product(kernel, short), np.float64)
  assert (np.abs(got - want) <= np.abs(want) * 2**-8).all()


def test_rounded_activations_have_a_scale_per_token_and_an_exact_sum():
  kernel = quantise_kernel(jnp.asarray(_kernel(6, 40)), 'int8_dynamic')
  assert kernel.round_activations
  x = np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32)
  x *= np.geomspace(
    0.01, 100, 5, dtype=np.float32
  )  # one scale for all tokens would lose the small ones
  steps = np.abs(x).max(0) / np.float32(127)
  rounded = np.clip(np.round(x / steps), -127, 127) * steps.astype(np.float64)
  want = np.asarray(kernel.dequantised(), np.float64) @ rounded
  for got in (columns_product(kernel, jnp.asarray(x)), rows_product(jnp.asarray(x.T), kernel).T):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
  alone = columns_product(kernel, jnp.asarray(x[:, :1]))
  np.testing.assert_array_equal(alone[:, 0], columns_product(kernel, jnp.asarray(x))[:, 0])


def test_plain_kernels_are_multiplied_as_they_are():
  kernel, x = jnp.asarray(_kernel(6, 40)), jnp.ones((40, 2))
  np.testing.assert_array_equal(columns_product(kernel, x), kernel @ x)


def test_a_quantised_kernel_is_a_tree_of_two_arrays():
  kernel = quantise_kernel(jnp.asarray(_kernel(3, 6, 40)), 'int8_dynamic')
  layer = jax.tree.map(lambda x: x[1], kernel)
  assert isinstance(layer, QuantisedKernel) and layer.round_activations
  assert (layer.values.shape, layer.scales.shape) == ((6, 40), (6,))


@pytest.mark.parametrize('dtype, largest', [(jnp.int8, 127), (jnp.float8_e4m3fn, 448)])
def test_the_largest_of_a_line_is_the_largest_of_the_dtype(dtype, largest):
  x = np.random.default_rng(2).normal(size=(50, 7)).astype(np.float32)
  values, scales = quantise_lines(jnp.asarray(x, jnp.bfloat16), dtype, axis=0)
  assert values.dtype == dtype and scales.shape == (1, 7) and scales.dtype == jnp.float32
  np.testing.assert_array_equal(np.abs(np.asarray(values, np.float32)).max(0), largest)
