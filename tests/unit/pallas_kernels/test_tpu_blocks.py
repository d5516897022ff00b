import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.pallas_kernels import tpu_blocks


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_dot_is_float32_over_either_axis(dtype):
  rng = np.random.default_rng(0)
  left, right = (jnp.asarray(rng.standard_normal((3, 5)), dtype) for _ in range(2))
  exact = [np.asarray(x, np.float64) for x in (left, right)]
  out = tpu_blocks.dot(left, right, 1)
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, exact[0] @ exact[1].T, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(tpu_blocks.dot(left, right.T, 0), out, rtol=1e-6)


def test_what_is_wholly_hidden_adds_nothing():
  assert jnp.exp(jnp.float32(tpu_blocks.HIDDEN) - jnp.float32(tpu_blocks.LOWEST)) == 0.0


def test_column_turns_lanes_into_rows():
  out = tpu_blocks.column(jnp.arange(3.0)[None])
  assert out.shape == (3, tpu_blocks.LANES)
  np.testing.assert_array_equal(out[:, 77], [0, 1, 2])
