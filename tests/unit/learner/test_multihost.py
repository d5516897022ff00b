"""What several processes share, in a job of one; two real ones are in tests/integration/test_two_processes.py."""

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.learner import multihost
from rlax_stack.sharding import make_mesh, sharding_for


def test_a_job_of_one_process_meets_nobody():
  multihost.meet('batch 0', word='any', deadline_s=0.0)
  assert multihost.digest({'a': np.arange(3)}) == ''


def test_words_of_batches_tell_them_apart(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  rows = {'a': np.arange(6).reshape(2, 3), 'b': None}
  word = multihost.digest(rows)
  assert len(word) == 16 and multihost.digest({'a': np.arange(6).reshape(2, 3), 'b': None}) == word
  assert multihost.digest({'a': rows['a'][::-1], 'b': None}) != word


def test_several_processes_place_what_one_does(monkeypatch):
  mesh = make_mesh({'fsdp': 2, 'context': 2}, jax.devices()[:4])
  sharding = sharding_for(mesh, ('rows', 'tokens'))
  x = {'x': np.arange(8, dtype=np.float32).reshape(2, 4)}
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  for placed in (multihost.place(x, sharding), multihost.place(x, {'x': sharding})):
    assert placed['x'].sharding == sharding
    np.testing.assert_array_equal(placed['x'], jax.device_put(x['x'], sharding))
  np.testing.assert_array_equal(multihost.fetch(placed['x']), x['x'])
  assert multihost.fetch(x['x']) is x['x']
  assert isinstance(multihost.fetch(jnp.ones(2)), np.ndarray)
