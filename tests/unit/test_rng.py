"""Randomness by identity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack import rng


def _threefry(key, counter):
  """Threefry-2x32 with 20 rounds from its paper (Salmon et al. 2011), one block, in python integers."""
  mask = 2**32 - 1
  schedule = [key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA]
  x0, x1 = (counter[0] + schedule[0]) & mask, (counter[1] + schedule[1]) & mask
  rotations = ([13, 15, 26, 6], [17, 29, 16, 24])
  for i in range(5):
    for r in rotations[i % 2]:
      x0 = (x0 + x1) & mask
      x1 = ((x1 << r | x1 >> (32 - r)) & mask) ^ x0
    x0 = (x0 + schedule[(i + 1) % 3]) & mask
    x1 = (x1 + schedule[(i + 2) % 3] + i + 1) & mask
  return x0, x1


def test_sample_key_is_fold_in_of_the_identities():
  expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(7, impl='threefry2x32'), 3), 5)
  np.testing.assert_array_equal(rng.sample_key_data(7, 3, 5), jax.random.key_data(expected))
  np.testing.assert_array_equal(
    jax.random.key_data(rng.sample_key(7, 3, 5)), jax.random.key_data(expected)
  )
  assert rng.sample_key_data(7, 3, 5).dtype == np.uint32


def test_sample_keys_differ_in_every_identity():
  keys = {tuple(rng.sample_key_data(s, g, i)) for s in range(3) for g in range(5) for i in range(4)}
  assert len(keys) == 60


def test_large_identities_work():
  top = 2**32 - 1
  assert tuple(rng.sample_key_data(top, top, top)) != tuple(rng.sample_key_data(0, top, top))


@pytest.mark.parametrize('identity', [(-1, 0, 0), (0, 2**32, 0), (0, 0, -3)])
def test_out_of_range_identity_is_refused(identity):
  with pytest.raises(ValueError, match='must be in'):
    rng.sample_key(*identity)


def test_token_uniforms_do_not_depend_on_batch_or_slot():
  keys = np.stack([rng.sample_key_data(1, 2, i) for i in range(6)])
  positions = np.arange(10, 16, dtype=np.int32)
  full = np.asarray(jax.jit(rng.token_uniforms)(keys, positions))
  assert full.shape == (6, 2) and full.dtype == np.float32
  order = np.array([4, 0, 5])
  np.testing.assert_array_equal(
    rng.token_uniforms(jnp.asarray(keys[order]), jnp.asarray(positions[order])), full[order]
  )


@pytest.mark.parametrize(
  ('identity', 'position', 'golden'),
  [((0, 0, 0), 0, (2668084, 6346338)), ((17, 4, 2), 9, (12158256, 9498770))],
)
def test_token_uniforms_golden(identity, position, golden):
  """Frozen numbers (a change here changes every run), equal to threefry written out by hand."""
  key = jnp.asarray(rng.sample_key_data(*identity))[None]
  values = np.asarray(rng.token_uniforms(key, jnp.asarray([position], dtype=jnp.int32)))
  assert tuple((values[0] * 2**24).astype(np.int64)) == golden
  words = (0, identity[0])
  for word in (*identity[1:], position):
    words = _threefry(words, (0, word))
  assert tuple(word >> 8 for word in words) == golden


def test_token_uniforms_are_uniform():
  keys = np.stack([rng.sample_key_data(3, g, 0) for g in range(8)])
  keys = np.repeat(keys, 1000, axis=0)
  positions = np.tile(np.arange(1000, dtype=np.int32), 8)
  values = np.asarray(jax.jit(rng.token_uniforms)(keys, positions))
  assert values.min() >= 0 and values.max() < 1
  counts, _ = np.histogram(values, bins=10, range=(0, 1))
  assert abs(counts - 1600).max() < 200  # five sigma is 190
  assert abs(np.corrcoef(values.T)[0, 1]) < 0.05
  assert len(np.unique(values)) > 15900


def test_numpy_rng_by_identity():
  def draw(*identity):
    return rng.numpy_rng(*identity).integers(2**62)

  assert draw(1, 'shuffle', 0) == draw(1, 'shuffle', 0)
  others = {
    draw(1, 'shuffle', 0),
    draw(1, 'shuffle', 1),
    draw(2, 'shuffle', 0),
    draw(1, 'split', 0),
    draw(1, 0),
    draw(1),
  }
  assert len(others) == 6
  with pytest.raises(ValueError, match='identity must be in'):
    rng.numpy_rng(1, -1)
  with pytest.raises(ValueError, match='run_seed must be in'):
    rng.numpy_rng(-1)
