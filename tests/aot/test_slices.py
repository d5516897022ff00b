"""A mesh over two described TPU slices: gathers stay inside a slice, and the sum of gradients alone crosses."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from rlax_stack.sharding import make_mesh

pytest.importorskip('libtpu')


def test_gathers_stay_inside_a_slice(compile_for):
  described = topologies.get_topology_desc(platform='tpu', topology_name='v5p:2x2x1', num_slices=2)
  mesh = make_mesh({'data': 2, 'fsdp': 4}, described.devices)
  assert [device.slice_index for device in mesh.devices.flat] == [0] * 4 + [1] * 4

  def gradient(kernel, rows):
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))
    found = jax.grad(lambda kernel: jnp.sum(jnp.tanh(rows @ kernel)))(kernel)
    return jax.lax.with_sharding_constraint(found, spread)

  compiled = compile_for(
    mesh,
    gradient,
    quick=True,
    kernel=((1024, 1024), jnp.float32, ('fsdp',)),
    rows=((4096, 1024), jnp.float32, (('data', 'fsdp'),)),
  )
  text = compiled.as_text()
  # A slice's part of the gradient, which is summed and split inside first, is all that the network carries.
  assert set(re.findall(r'_xla_megascale_transfer_type="(\w+)"', text)) == {'ALL_REDUCE'}
  sent = re.findall(r'%send[\w.]* = \(f32\[([\d,]+)\]', text)
  assert [math.prod(int(n) for n in shape.split(',')) for shape in sent] == [1024 * 1024 // 4]
  assert ' all-gather(' in text
