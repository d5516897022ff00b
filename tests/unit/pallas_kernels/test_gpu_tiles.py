"""What the GPU kernels share, in a kernel of the GPU interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlax_stack.pallas_kernels import gpu_tiles
from rlax_stack.pallas_kernels.gpu_tiles import HIDDEN, LOG2E, LOWEST, TILE


@pytest.mark.skipif(
  not hasattr(plgpu, 'InterpretGPUParams'), reason='the GPU interpreter came with jax 0.12'
)
@pytest.mark.parametrize('workers', [1, 2])
def test_tiles_of_every_warpgroup_equal_numpy(workers):
  rng = np.random.default_rng(0)
  q = jnp.asarray(rng.standard_normal((workers, TILE, 64)), jnp.bfloat16)
  k, v = (jnp.asarray(rng.standard_normal((TILE, 64)), jnp.bfloat16) for _ in range(2))
  of_rows = jnp.arange(TILE, dtype=jnp.float32)

  def body(ref):
    wg = lax.axis_index('wg')

    @pl.when(wg == workers)
    def _():
      for name in ('k', 'v'):
        plgpu.copy_gmem_to_smem(ref[name], ref[f'{name}_smem'], ref['full'])

    @pl.when(wg < workers)
    def _():
      q_smem = ref['q_smem'].at[wg]
      plgpu.copy_gmem_to_smem(ref['q'].at[wg], q_smem, ref['own'].at[wg])
      plgpu.barrier_wait(ref['own'].at[wg])
      plgpu.barrier_wait(ref['full'])
      straight = gpu_tiles.multiply(q_smem, ref['k_smem'])
      pair = gpu_tiles.multiply_pairs((q_smem, q_smem), (ref['k_smem'], ref['v_smem']))
      numbers = gpu_tiles.vector_over(0, ref['of_rows'])
      places = gpu_tiles.tile_iota(straight.shape, 1).astype(jnp.float32)
      for i, tile in enumerate(
        (
          straight,
          *pair,
          gpu_tiles.spread(numbers, straight.shape, 0) - places,
        )
      ):
        ref['out'].at[wg, i][...] = tile

  (out,) = gpu_tiles.launch(
    'tiles',
    body,
    inputs={'q': q, 'k': k, 'v': v, 'of_rows': of_rows},
    outputs={'out': jax.ShapeDtypeStruct((workers, 4, TILE, 64), jnp.float32)},
    scratch={
      'q_smem': plgpu.SMEM((workers, TILE, 64), jnp.bfloat16),
      'k_smem': plgpu.SMEM((TILE, 64), jnp.bfloat16),
      'v_smem': plgpu.SMEM((TILE, 64), jnp.bfloat16),
      'own': plgpu.Barrier(num_barriers=workers),
      'full': plgpu.Barrier(num_arrivals=2),
    },
    grid={'one': 1},
    warpgroups=workers + 1,
    interpret=plgpu.InterpretGPUParams(detect_races=True),
  )
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  back = np.arange(TILE)[:, None] - np.arange(64)[None] + np.zeros((workers, 1, 1))
  np.testing.assert_allclose(out, np.stack([q @ k, q @ k.T, q @ v.T, back], 1), atol=1e-4)


@pytest.mark.parametrize('soft_cap', [None, 2.0])
def test_scores_and_their_gradients_are_those_of_the_cap(soft_cap):
  products, scale = jnp.linspace(-300, 300, 601), 0.1

  def exact(x):
    return scale * x if soft_cap is None else soft_cap * jnp.tanh(scale * x / soft_cap)

  scores, tanh = gpu_tiles.scores_of(products, scale, soft_cap)
  np.testing.assert_allclose(scores / LOG2E, exact(products), rtol=1e-6, atol=1e-6)
  got = gpu_tiles.d_products(jnp.ones_like(products), tanh, scale)
  np.testing.assert_allclose(got, jax.vmap(jax.grad(exact))(products), atol=1e-6)


def test_what_is_hidden_weighs_nothing_beside_the_first_maximum():
  assert np.exp2(np.float32(HIDDEN) - np.float32(LOWEST)) == 0
