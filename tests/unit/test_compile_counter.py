"""Compilations counted on the jax that is installed, with real jitted functions."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rlax_stack.compile_counter import CompileCounter


def test_counts_new_programs_and_not_repeated_calls():
  @jax.jit
  def cubed_for_the_counter(x):
    return x * x * x

  inputs = [jnp.ones((size,), jnp.float32) for size in (3, 4)]
  with CompileCounter() as counter:
    mark = counter.count
    cubed_for_the_counter(inputs[0]).block_until_ready()
    first = counter.since(mark)
    mark = counter.count
    cubed_for_the_counter(inputs[0]).block_until_ready()
    again = counter.since(mark)
    cubed_for_the_counter(inputs[1]).block_until_ready()  # another shape: another program
    other = counter.since(mark)
  assert (first.programs, first.cache_hits, first.compiled) == (1, 0, 1)
  assert 'cubed_for_the_counter' in first.names[0]
  assert first.seconds > 0
  assert (again.programs, again.names) == (0, ())
  assert other.programs == 1


def test_a_closed_counter_counts_nothing():
  counter = CompileCounter().start()
  counter.start()
  counter.stop()
  counter.stop()
  jax.jit(lambda x: x - 7)(jnp.ones((5,), jnp.float32)).block_until_ready()
  assert counter.count.programs == 0


@pytest.fixture
def persistent_cache(tmp_path):
  names = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs')
  old = {name: getattr(jax.config, name) for name in names}
  compilation_cache.reset_cache()
  jax.config.update(names[0], str(tmp_path))
  jax.config.update(names[1], 0.0)
  yield
  for name, value in old.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def test_a_hit_of_the_persistent_cache_is_a_program_but_no_compilation(persistent_cache):
  x = jnp.ones((6,), jnp.float32)

  def build():
    return jax.jit(lambda x: x * 3 + 11)

  with CompileCounter() as counter:
    build()(x).block_until_ready()
    cold = counter.count
    jax.clear_caches()
    build()(x).block_until_ready()
    warm = counter.since(cold)
  assert (cold.programs, cold.cache_hits) == (1, 0)
  assert (warm.programs, warm.cache_hits, warm.compiled) == (1, 1, 0)
