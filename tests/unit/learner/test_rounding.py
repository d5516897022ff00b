"""bfloat16 moments: unbiased, within one step of the grid, and the same bits after a resume."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlax_stack.learner.rounding import RoundedState, rounded_state, stochastic_round
from rlax_stack.rng import update_key


def _grid(x):
  """The two bfloat16 neighbours of each finite float32, by the bits, as float64."""
  words = x.view(np.uint32)
  low = (words & np.uint32(0xFFFF0000)).view(np.float32)
  high = ((words & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
  return low.astype(np.float64), high.astype(np.float64)


def test_the_mean_of_many_draws_is_the_value_and_each_is_a_neighbour():
  rng = np.random.default_rng(0)
  x = (rng.standard_normal(64) * 10.0 ** rng.integers(-20, 20, 64)).astype(np.float32)
  draws = 4096
  keys = jax.vmap(lambda i: update_key(3, i))(jnp.arange(draws))
  found = np.asarray(jax.jit(jax.vmap(stochastic_round, (0, None)))(keys, x)).astype(np.float64)
  low, high = _grid(x)
  assert ((found == low) | (found == high)).all()
  # A draw is high with probability (x - low) / (high - low): the mean's error has that deviation.
  share = (x - low) / (high - low)
  deviation = np.abs(high - low) * np.sqrt(share * (1 - share) / draws)
  assert (np.abs(found.mean(0) - x) < 4.5 * deviation + 1e-7 * np.abs(x)).all()
  # Rounding to the nearest would be off by more than that.
  nearest = x.astype(jnp.bfloat16).astype(np.float64)
  assert (np.abs(nearest - x) > 4.5 * deviation).mean() > 0.9


def test_what_bfloat16_holds_is_kept():
  x = np.array([0.0, -0.0, 1.5, -(2.0**-126), np.inf, -np.inf, np.nan, 256.0], np.float32)
  x = np.append(x, np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32))  # NaNs
  found = np.asarray(stochastic_round(jax.random.key(0), jnp.asarray(x))).astype(np.float32)
  np.testing.assert_array_equal(found, x)


def _run(transform, gradients, state):
  update = jax.jit(transform.update)
  for gradient in gradients:
    with jax.numpy_dtype_promotion('standard'):
      updates, state = update(gradient, state)
  return updates, state


def test_moments_follow_those_of_float32_and_a_resume_rounds_alike():
  rng = np.random.default_rng(1)
  shape = (32, 32)
  gradients = [
    {'embedder': {'embedding': rng.standard_normal(shape).astype(np.float32)}} for _ in range(6)
  ]
  wide = optax.scale_by_adam(b1=0.9, b2=0.999)
  narrow = rounded_state(wide, seed=7)
  start = narrow.init(gradients[0])
  assert isinstance(start, RoundedState) and start.inner.count.dtype == jnp.int32
  _, middle = _run(narrow, gradients[:3], start)
  assert {x.dtype for x in jax.tree.leaves((middle.inner.mu, middle.inner.nu))} == {
    jnp.dtype('bfloat16')
  }
  _, whole = _run(narrow, gradients, start)
  _, resumed = _run(narrow, gradients[3:], middle)
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  want = _run(wide, gradients, wide.init(gradients[0]))[1]
  for got, exact in ((whole.inner.mu, want.mu), (whole.inner.nu, want.nu)):
    error = np.asarray(got['embedder']['embedding']).astype(np.float64)
    error -= np.asarray(exact['embedder']['embedding'])
    scale = np.abs(np.asarray(exact['embedder']['embedding'])).mean()
    assert abs(error.mean()) < 2e-4 * scale and np.abs(error).max() < 0.1 * scale
  other = _run(rounded_state(wide, seed=8), gradients, start)[1]
  assert any(
    (np.asarray(a) != np.asarray(b)).any()
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(whole), strict=True)
  )


def test_update_keys_differ_by_seed_and_count():
  data = [jax.random.key_data(update_key(seed, jnp.int32(i))) for seed in (0, 1) for i in (0, 1)]
  assert len({tuple(np.asarray(x).tolist()) for x in data}) == 4
  with pytest.raises(ValueError, match='run_seed must be in'):
    update_key(-1, jnp.int32(0))
