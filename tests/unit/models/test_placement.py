"""Where hidden states and a layer's parameters lie, and that nothing but that changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rlax_stack.errors import ConfigError
from rlax_stack.models.placement import placed_layer, placed_rows
from rlax_stack.sharding import make_mesh


def _spec(x):
  return PartitionSpec(*x.sharding.spec)


def test_rows_and_a_layer_lie_as_the_table_says():
  mesh = make_mesh({'fsdp': 2, 'tensor': 2}, jax.devices()[:4])
  x = jnp.arange(2.0 * 4 * 8).reshape(2, 4, 8)
  layer = {'q_proj': {'kernel': jnp.ones((8, 8))}, 'attn_norm': {'scale': jnp.ones(8)}}
  rows, found = jax.jit(lambda x, layer: (placed_rows(x, mesh), placed_layer(layer, mesh)))(
    x, layer
  )
  assert rows.sharding.shard_shape(rows.shape) == (1, 4, 8)
  kernel = found['q_proj']['kernel']
  assert kernel.sharding.shard_shape(kernel.shape) == (4, 4) and _spec(kernel) == PartitionSpec(
    'tensor', 'fsdp'
  )
  assert found['attn_norm']['scale'].sharding.is_fully_replicated
  np.testing.assert_array_equal(rows, x)
  assert placed_rows(x, None) is x and placed_layer(layer, None) is layer
  with pytest.raises(ConfigError, match='no logical axes'):
    placed_layer({'new_proj': {'kernel': jnp.ones((8, 8))}}, mesh)


def test_gradients_of_a_layer_lie_as_it_does():
  mesh = make_mesh({'fsdp': 4}, jax.devices()[:4])
  layer = {'down_proj': {'kernel': jnp.ones((8, 16))}}
  rows = jax.device_put(
    jnp.ones((4, 3, 16)), jax.sharding.NamedSharding(mesh, PartitionSpec('fsdp'))
  )

  def loss(layer, rows):
    kernel = placed_layer(layer, mesh)['down_proj']['kernel']
    return jnp.sum(jnp.square(rows @ kernel.T))

  gradient = jax.jit(jax.grad(loss))(layer, rows)['down_proj']['kernel']
  assert gradient.sharding.shard_shape(gradient.shape) == (2, 16)
  np.testing.assert_allclose(gradient, 2 * 16 * 12 * np.ones((8, 16)))
