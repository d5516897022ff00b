"""FLOPs of traced programs against sums by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from rlax_stack.models.experts import LOOP, ExpertKernels, mix, route
from rlax_stack.planning.traced_flops import Counting, traced_flops
from rlax_stack.sharding import make_mesh


def _shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_a_product_and_its_gradients():
  product = 2 * 3 * 5 * 7
  assert traced_flops(lambda x, w: x @ w, _shape(3, 5), _shape(5, 7)) == product
  batched = traced_flops(
    lambda x, w: jnp.einsum('bij,bjk->bik', x, w), _shape(2, 3, 5), _shape(2, 5, 7)
  )
  assert batched == 2 * product
  gradient = jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w)), argnums=(0, 1))
  assert traced_flops(gradient, _shape(3, 5), _shape(5, 7)) == 3 * product


def test_loops_count_as_often_as_they_run():
  def layers(x, kernels):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, kernels)[0]

  assert traced_flops(layers, _shape(3, 4), _shape(6, 4, 4)) == 6 * 2 * 3 * 4 * 4

  def micro_batches(x, w, count):
    return jax.lax.fori_loop(0, count, lambda i, x: x @ w, x)

  arguments = (_shape(3, 4), _shape(4, 4), jax.ShapeDtypeStruct((), jnp.int32))
  assert (
    traced_flops(micro_batches, *arguments, counting=Counting(unknown_trips=5)) == 5 * 2 * 3 * 4 * 4
  )


def test_what_is_computed_again_counts_again():
  def loss(w, x):
    return jnp.sum(jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))(x))

  # Two products forward, two more in the backward pass, and four of gradients, of which that of x is not asked for.
  assert traced_flops(jax.grad(loss), _shape(4, 4), _shape(3, 4)) == 7 * 2 * 3 * 4 * 4


def test_the_dearest_branch_counts():
  def either(on, x, w):
    return jax.lax.cond(on, lambda: x @ w @ w, lambda: x @ w)

  on = jax.ShapeDtypeStruct((), jnp.bool_)
  assert traced_flops(either, on, _shape(3, 4), _shape(4, 4)) == 2 * 2 * 3 * 4 * 4


def test_a_program_of_one_device_runs_on_all():
  mesh = make_mesh({'data': 2, 'tensor': 2}, jax.devices()[:4])
  rows, whole = PartitionSpec('data'), PartitionSpec()
  product = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
  # Two devices do the same rows: all four compute.
  assert traced_flops(product, _shape(6, 4), _shape(4, 4)) == 4 * 2 * 3 * 4 * 4


def test_kernels_say_what_they_cost():
  def kernel(x, out):
    out[...] = x[...] * 2

  def call(x, estimate):
    return pl.pallas_call(kernel, out_shape=_shape(8, 128), cost_estimate=estimate, interpret=True)(
      x
    )

  estimate = pl.CostEstimate(flops=1234, bytes_accessed=0, transcendentals=0)
  assert traced_flops(lambda x: call(x, estimate), _shape(8, 128)) == 1234
  assert traced_flops(lambda x: call(x, None), _shape(8, 128)) == 0


@pytest.mark.parametrize('experts', [2, 3])
def test_grouped_products(experts):
  sizes = np.full(experts, 2, np.int32)
  flops = traced_flops(
    lambda x, w: jax.lax.ragged_dot(x, w, sizes), _shape(2 * experts, 5), _shape(experts, 5, 7)
  )
  assert flops == 2 * 2 * experts * 5 * 7


@pytest.mark.parametrize('form', ['ragged', 'blocks'])
def test_experts_on_a_mesh(form):
  """A device sees the rows of both, and half of their choices are of the experts that it has."""
  tokens, width, inner, count, chosen, parts = 64, 4, 8, 6, 3, 2
  mesh = make_mesh({'expert': parts}, jax.devices()[:parts])

  def layer(x, router, kernels):
    routing = route(x, router, experts_per_token=chosen, normalise=True)
    return mix(x, routing, kernels, mesh=mesh, form=form)

  kernels = ((count, inner, width), (count, inner, width), (count, width, inner))
  arguments = (_shape(parts, tokens, width), _shape(count, width))
  kernels = ExpertKernels(*(_shape(*kernel) for kernel in kernels))
  counting = Counting(unknown_trips=99, block_trips=1.5, grouped_share=0.5)
  rows = parts * tokens * chosen if form == 'ragged' else parts * 1.5 * 128  # blocks of 128
  want = parts * 2 * tokens * width * count + 3 * 2 * rows * width * inner
  assert traced_flops(layer, *arguments, kernels, counting=counting) == want
  assert counting.trips(f'a/{LOOP}/b') == 1.5 and counting.trips('a') == 99
