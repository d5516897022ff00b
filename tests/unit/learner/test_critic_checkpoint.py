"""A critic in checkpoints: exact resume, warm start, and what is told where there is none."""

import jax
import numpy as np
import pytest

from rlax_stack.errors import CheckpointError, ConfigError
from rlax_stack.learner.checkpoint import Checkpointer, load_checkpoint_critic


@pytest.fixture(scope='module')
def groups(cut_groups):
  return cut_groups


def _leaves(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _assert_equal(got, want):
  for a, b in zip(_leaves(got), _leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  'critic', [pytest.param('separate(updates=2)', marks=pytest.mark.slow), 'shared_trunk']
)
def test_resume_is_exact(critic, tmp_path, make_critic_learner, groups):
  whole, cut = make_critic_learner(critic), make_critic_learner(critic)
  whole.train(groups).result()
  cut.train(groups).result()
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, cut.state, {})
  again = make_critic_learner(critic, random_head=False)
  again.restore(checkpointer.restore_latest(again.abstract_state()).state)
  checkpointer.close()
  _assert_equal(again.state, whole.state)
  want, got = whole.train(groups).result(), again.train(groups).result()
  assert want == got
  _assert_equal(again.state, whole.state)


def test_a_checkpoint_of_the_other_kind_says_so(tmp_path, make_learner, make_critic_learner):
  for name, saver, reader, message in (
    ('without', make_learner(), make_critic_learner(), 'it has no critic and this run has one'),
    ('with', make_critic_learner(), make_learner(), 'it has a critic and this run has none'),
  ):
    checkpointer = Checkpointer(tmp_path / name)
    checkpointer.save(1, saver.state, {})
    with pytest.raises(CheckpointError, match=message):
      checkpointer.restore_latest(reader.abstract_state())
    checkpointer.close()


def test_warm_start_takes_the_critic_over_bit_for_bit(tmp_path, make_critic_learner, groups):
  first = make_critic_learner()
  first.train(groups).result()
  checkpointer = Checkpointer(tmp_path / 'run' / 'checkpoints')
  checkpointer.save(1, first.state, {})
  checkpointer.close()
  for source in ('run', 'run/checkpoints', 'run/checkpoints/1'):
    found = load_checkpoint_critic(tmp_path / source)
    _assert_equal(found, first.state.critic['params'])
  second = make_critic_learner(random_head=False)
  policy = second.snapshot()
  second.take_critic(found, 'run')
  _assert_equal(second.state.critic['params'], first.state.critic['params'])
  _assert_equal(second.params, policy)
  assert all((leaf == 0).all() for leaf in _leaves(second.state.critic['opt_state']))
  second.train(groups).result()
  with pytest.raises(ConfigError, match=r'critic of run has other parameters .*warm_start'):
    make_critic_learner('shared_trunk').take_critic(found, 'run')


def test_warm_start_from_nothing_is_refused(tmp_path, make_learner):
  with pytest.raises(CheckpointError, match='there is no such directory'):
    load_checkpoint_critic(tmp_path / 'nowhere')
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, make_learner().state, {})
  checkpointer.close()
  with pytest.raises(CheckpointError, match='has no critic'):
    load_checkpoint_critic(tmp_path)


def test_damaged_critic_is_noticed(tmp_path, make_critic_learner):
  learner = make_critic_learner()
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, learner.state, {})
  checkpointer.wait()
  for path in (tmp_path / '1' / 'critic').glob('**/d/*'):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
  with pytest.raises(CheckpointError, match='cannot be read'):
    load_checkpoint_critic(tmp_path)
  with pytest.raises(CheckpointError, match='step 1'):
    checkpointer.restore_latest(learner.abstract_state())
  checkpointer.close()
