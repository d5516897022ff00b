"""One commit or none; bit for bit; damage is noticed, said and survived."""

import json
import logging
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import CheckpointError
from rlax_stack.learner.checkpoint import Checkpointer, load_checkpoint_params
from rlax_stack.learner.optimizer import OptimizerSettings, make_optimizer
from rlax_stack.learner.state import abstract_state, init_state
from rlax_stack.sharding import make_mesh

_EXTRAS = {'version': 3, 'iterator': {'epoch': 1, 'index': [4, 5]}, 'ledger': 'é'}


@pytest.fixture(scope='module')
def optimizer():
  return make_optimizer(OptimizerSettings(learning_rate=1e-3, weight_decay=0.1))


def _params():
  rng = np.random.default_rng(0)
  return {
    'embedder': {'embedding': rng.standard_normal((64, 16)).astype(np.float32)},
    'final_norm': {'scale': np.ones(16, np.float32)},
  }


def _mesh(**sizes):
  return make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])


def _state(optimizer, mesh, step=0):
  state = init_state(_params(), optimizer, mesh)
  return state._replace(step=jax.device_put(np.int32(step), state.step.sharding))


def _assert_equal(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize('asynchronous', [True, False])
def test_round_trip_keeps_the_newest(tmp_path, optimizer, asynchronous):
  mesh = _mesh()
  target = abstract_state(_params(), optimizer, mesh)
  checkpointer = Checkpointer(tmp_path / 'c', keep=2, asynchronous=asynchronous)
  assert checkpointer.restore_latest(target) is None
  for step in (1, 2, 5):
    checkpointer.save(step, _state(optimizer, mesh, step), _EXTRAS | {'step': step})
  checkpointer.close()
  checkpointer = Checkpointer(tmp_path / 'c')
  assert checkpointer.steps() == [2, 5]
  restored = checkpointer.restore_latest(target)
  checkpointer.close()
  assert restored.step == 5
  assert restored.extras == _EXTRAS | {'step': 5}
  _assert_equal(restored.state, _state(optimizer, mesh, 5))
  assert jax.tree.structure(restored.state) == jax.tree.structure(_state(optimizer, mesh))


def test_restores_onto_another_mesh(tmp_path, optimizer):
  checkpointer = Checkpointer(tmp_path / 'c')
  checkpointer.save(1, _state(optimizer, _mesh(fsdp=4)), {})
  target = abstract_state(_params(), optimizer, _mesh(tensor=2))
  restored = checkpointer.restore_latest(target)
  checkpointer.close()
  _assert_equal(restored.state, _state(optimizer, _mesh()))
  assert restored.state.params['embedder']['embedding'].sharding.mesh.shape['tensor'] == 2


def test_state_may_be_donated_right_after_save(tmp_path, optimizer):
  mesh = _mesh()
  state = _state(optimizer, mesh)
  checkpointer = Checkpointer(tmp_path / 'c')
  checkpointer.save(1, state, {})
  spoil = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
  jax.block_until_ready(spoil(state))
  restored = checkpointer.restore_latest(abstract_state(_params(), optimizer, mesh))
  checkpointer.close()
  _assert_equal(restored.state, _state(optimizer, mesh))


def _two_steps(directory, optimizer):
  checkpointer = Checkpointer(directory)
  for step in (1, 2):
    checkpointer.save(step, _state(optimizer, _mesh(), step), {'step': step})
  checkpointer.close()


def _tear(directory):
  """A directory as a killed save leaves it: everything written, nothing committed."""
  torn = directory / '7.orbax-checkpoint-tmp-12345'
  (torn / 'params').mkdir(parents=True)
  (torn / 'params' / 'manifest.ocdbt').write_bytes(b'half')


def test_torn_directory_is_ignored_and_removed(tmp_path, optimizer):
  _two_steps(tmp_path, optimizer)
  _tear(tmp_path)
  checkpointer = Checkpointer(tmp_path)
  restored = checkpointer.restore_latest(abstract_state(_params(), optimizer, _mesh()))
  checkpointer.close()
  assert restored.step == 2
  assert sorted(p.name for p in tmp_path.iterdir()) == ['1', '2']


def _flip_bit(step):
  for path in step.glob('params/**/d/*'):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _truncate(step):
  for path in step.glob('rest/**/d/*'):
    path.write_bytes(path.read_bytes()[:10])


def _wrong_checksum(step):
  path = step / 'document' / 'metadata'
  document = json.loads(path.read_text())
  document['checksums'][0] ^= 1
  path.write_text(json.dumps(document))


def _lose_document(step):
  (step / 'document' / 'metadata').unlink()


# Several reads fail at once; those that fail after the first find their event loop closed.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('damage', [_flip_bit, _truncate, _wrong_checksum, _lose_document])
def test_damaged_newest_falls_back_loudly(tmp_path, optimizer, damage, caplog):
  directory = tmp_path / 'c'
  _two_steps(directory, optimizer)
  damage(directory / '2')
  target = abstract_state(_params(), optimizer, _mesh())
  checkpointer = Checkpointer(directory)
  with caplog.at_level(logging.ERROR):
    restored = checkpointer.restore_latest(target)
  assert 'checkpoint step 2 cannot be restored' in caplog.text
  assert (restored.step, restored.extras) == (1, {'step': 1})
  # The number is free again.
  checkpointer.save(2, _state(optimizer, _mesh(), 2), {'step': 'again'})
  assert checkpointer.restore_latest(target).extras == {'step': 'again'}
  checkpointer.close()
  assert (tmp_path / 'c-damaged' / '2').is_dir()


def test_nothing_left_to_restore(tmp_path, optimizer):
  _two_steps(tmp_path, optimizer)
  for step in ('1', '2'):
    _lose_document(tmp_path / step)
  checkpointer = Checkpointer(tmp_path)
  with pytest.raises(CheckpointError, match='no checkpoint in .* can be restored. step 2'):
    checkpointer.restore_latest(abstract_state(_params(), optimizer, _mesh()))
  checkpointer.close()


def test_other_shapes_are_refused(tmp_path, optimizer):
  _two_steps(tmp_path, optimizer)
  params = {'final_norm': {'scale': jnp.ones(8)}, 'embedder': {'embedding': jnp.ones((64, 8))}}
  checkpointer = Checkpointer(tmp_path)
  with pytest.raises(CheckpointError, match='step 2'):
    checkpointer.restore_latest(abstract_state(params, optimizer, _mesh()))
  checkpointer.close()


def test_params_alone_as_numpy(tmp_path, optimizer):
  _two_steps(tmp_path, optimizer)
  params = load_checkpoint_params(tmp_path)
  assert all(type(x) is np.ndarray for x in jax.tree.leaves(params))
  assert jax.tree.structure(params) == jax.tree.structure(_params())
  _assert_equal(params, _params())
  _assert_equal(load_checkpoint_params(tmp_path, 1), _params())
  with pytest.raises(CheckpointError, match=r'step 9 .*\[1, 2\]'):
    load_checkpoint_params(tmp_path, 9)
  with pytest.raises(CheckpointError, match='no such directory'):
    load_checkpoint_params(tmp_path / 'nowhere')
  _flip_bit(tmp_path / '2')
  with pytest.raises(CheckpointError, match='cannot be read'):
    load_checkpoint_params(tmp_path, 2)


def test_directory_that_is_a_file(tmp_path):
  path = pathlib.Path(tmp_path / 'file')
  path.write_text('x')
  with pytest.raises(CheckpointError, match='cannot use .*file'):
    Checkpointer(path)
