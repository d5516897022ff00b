"""Frozen weights: error of integers, what is rounded and what is not, the model that comes of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models import decoder
from rlax_stack.models.frozen import (
  PRECISIONS,
  BlockKernel,
  freeze,
  is_block_kernel,
  quantise_blocks,
)
from rlax_stack.models.shapes import SHAPES


@pytest.mark.parametrize(('precision', 'largest'), [('int8', 127), ('int4', 7)])
@pytest.mark.parametrize(('size', 'blocks'), [(128, 2), (96, 2), (20, 1), (67, 67)])
def test_error_is_at_most_half_a_step(precision, largest, size, blocks):
  rng = np.random.default_rng(0)
  kernel = rng.standard_normal((2, 6, size)).astype(np.float32) * 10.0 ** rng.integers(-3, 3)
  kernel[0, 0] = 0.0
  quantised = quantise_blocks(jnp.asarray(kernel), precision)
  assert quantised.scales.shape == (2, 6, blocks)
  values, scales = np.asarray(quantised.values).astype(np.int32), np.asarray(quantised.scales)
  assert abs(values).max() <= largest
  back = values.reshape(2, 6, blocks, -1) * scales[..., None].astype(np.float64)
  error = abs(back.reshape(kernel.shape) - kernel).reshape(2, 6, blocks, -1)
  assert (error <= scales[..., None] * (0.5 + 1e-5)).all()
  np.testing.assert_allclose(quantised.dequantised(), back.reshape(kernel.shape), rtol=1e-6)
  assert quantised.dequantised(jnp.bfloat16).dtype == jnp.bfloat16


def test_four_bits_are_asked_for_by_name():
  with pytest.raises(ValueError, match='float32 has no integers'):
    quantise_blocks(jnp.ones((2, 2)), 'float32')


def _tiny():
  config = dataclasses.replace(
    SHAPES['smollm2_135m'],
    num_layers=2,
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
  )
  rng = np.random.default_rng(0)
  params = jax.tree_util.tree_map_with_path(
    lambda path, leaf: (
      np.ones(leaf.shape, np.float32)
      if path[-1].key == 'scale'
      else (0.1 * rng.standard_normal(leaf.shape)).astype(np.float32)
    ),
    decoder.abstract_params(config),
  )
  return config, params


def test_layers_are_rounded_and_the_rest_is_bfloat16():
  config, params = _tiny()
  tokens = jnp.arange(8, dtype=jnp.int32)[None]

  def logits(weights):
    hidden = decoder.hidden_states(weights, config, tokens, tokens, lambda q, k, v: q)
    return np.asarray(hidden @ jnp.asarray(params['embedder']['embedding']).T)

  want = logits(params)
  spread, errors = np.std(want), {}
  for precision in PRECISIONS:
    frozen = freeze(params, precision)
    again = freeze(frozen, precision)
    jax.tree.map(np.testing.assert_array_equal, frozen, again)
    errors[precision] = np.sqrt(np.mean((logits(frozen) - want) ** 2)) / spread
    integers = PRECISIONS[precision] is not None
    assert isinstance(frozen['layers']['q_proj']['kernel'], BlockKernel) == integers
    assert is_block_kernel(frozen['layers']['q_proj']['kernel']) == integers
    dtype = jnp.float32 if precision == 'float32' else jnp.bfloat16
    assert frozen['embedder']['embedding'].dtype == frozen['final_norm']['scale'].dtype == dtype
  assert errors['float32'] == 0
  for precision in ('float32', 'int8'):
    with pytest.raises(ValueError, match=f'are int4 already, and cannot be made {precision}'):
      freeze(freeze(params, 'int4'), precision)
  # A step of int4 is a third of the weights' deviation: a tenth of error in each product, of int8 a hundredth.
  assert 0 < errors['int8'] < 0.03 and errors['int8'] < errors['int4'] < 0.35
