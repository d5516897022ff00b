"""The masked log-ratio that every ratio is made of."""

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.objectives.trust_region import log_ratio


def test_float32_difference_and_exact_zero_where_masked():
  current = jnp.asarray([-1.0, -2.0, jnp.nan, -jnp.inf], jnp.bfloat16)
  base = jnp.asarray([-1.5, -2.0, -1.0, 0.0], jnp.bfloat16)
  mask = jnp.asarray([True, True, False, False])
  out = log_ratio(current, base, mask)
  assert out.dtype == jnp.float32
  np.testing.assert_array_equal(out, [0.5, 0.0, 0.0, 0.0])


def test_masked_infinity_does_not_reach_the_gradient_of_exp():
  base = jnp.asarray([-1.0, jnp.inf], jnp.float32)
  mask = jnp.asarray([True, False])
  gradient = jax.grad(lambda x: jnp.sum(jnp.exp(log_ratio(x, base, mask))))
  out = gradient(jnp.asarray([-1.0, -1.0], jnp.float32))
  np.testing.assert_array_equal(out, [1.0, 0.0])
