"""Randomness by identity: every random number is a pure function of who asks for it, never of when or where.

A sampled token depends on (run seed, group id, sample index, position) and on nothing else, so a sample that is redone
on another worker, in another slot or after a restart uses the same numbers. No generator here carries state.
Threefry is named explicitly: the numbers do not follow `jax_default_prng_impl`.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

_IMPL = 'threefry2x32'
_SEED_LIMIT = 2**32


def _check_word(name: str, value: int) -> None:
  if not 0 <= value < _SEED_LIMIT:
    raise ValueError(
      f'{name} must be in [0, 2**32), got {value}. Choose a smaller, non-negative {name}.'
    )


@jax.jit
def _fold_identities(
  run_seed: jax.Array, group_id: jax.Array, sample_index: jax.Array
) -> jax.Array:
  key = jax.random.key(run_seed, impl=_IMPL)
  return jax.random.fold_in(jax.random.fold_in(key, group_id), sample_index)


def sample_key(run_seed: int, group_id: int, sample_index: int) -> jax.Array:
  """Typed jax key (scalar) of one sample.

  Args:
    run_seed: the run's seed, in [0, 2**32).
    group_id: id of the group, in [0, 2**32).
    sample_index: index of the sample in its group, in [0, 2**32).

  Raises:
    ValueError: one of the three is out of range.
  """
  identity = {'run_seed': run_seed, 'group_id': group_id, 'sample_index': sample_index}
  for name, value in identity.items():
    _check_word(name, value)
  return _fold_identities(*(np.uint32(value) for value in identity.values()))


def sample_key_data(run_seed: int, group_id: int, sample_index: int) -> np.ndarray:
  """`sample_key` as raw words, uint32 [2] on the host: what a slot's row of a [S, 2] array holds."""
  return np.asarray(jax.random.key_data(sample_key(run_seed, group_id, sample_index)))


def token_uniforms(key_data: jax.Array, positions: jax.Array) -> jax.Array:
  """Two uniforms per (key, position); pure, to be used inside jit.

  The 64 bits that threefry gives for (key, position) are the two numbers, 24 bits each: one block of threefry
  a token, and every value is exact in f32, so they are equal on every backend.

  Args:
    key_data: uint32 [B, 2], rows from `sample_key_data`.
    positions: int32 [B], position of the token that is being sampled (depth from the root), >= 0.

  Returns:
    float32 [B, 2] in [0, 1).
  """
  keys = jax.random.wrap_key_data(key_data, impl=_IMPL)
  words = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, positions.astype(jnp.uint32)))
  return (words >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)


def update_key(run_seed: int, count: jax.Array) -> jax.Array:
  """Typed jax key (scalar) of one update of an optimizer; pure, to be used inside jit.

  Args:
    run_seed: the run's seed, in [0, 2**32).
    count: int32 scalar, updates made before.

  Raises:
    ValueError: the seed is out of range.
  """
  _check_word('run_seed', run_seed)
  key = jax.random.key(np.uint32(run_seed), impl=_IMPL)
  return jax.random.fold_in(key, count.astype(jnp.uint32))


def numpy_rng(run_seed: int, *identity: int | str) -> np.random.Generator:
  """Numpy generator of one purpose, for the data side: `numpy_rng(seed, 'shuffle', epoch)`.

  Args:
    run_seed: the run's seed, in [0, 2**32).
    *identity: non-negative integers and names; other identities give independent streams.

  Raises:
    ValueError: the seed is out of range or an integer is negative.
  """
  _check_word('run_seed', run_seed)
  words = []
  for part in identity:
    # The kind goes in first, so that an integer never collides with a name's hash.
    if isinstance(part, str):
      digest = hashlib.blake2b(part.encode(), digest_size=8).digest()
      words += [1, int.from_bytes(digest[:4], 'little'), int.from_bytes(digest[4:], 'little')]
    else:
      _check_word('identity', part)
      words += [0, part]
  return np.random.Generator(
    np.random.Philox(np.random.SeedSequence(run_seed, spawn_key=tuple(words)))
  )
