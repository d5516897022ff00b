"""Signs of life over a store and a clock of the test; a real kill is in tests/integration/test_two_processes.py."""

import jax
import pytest

from rlax_stack.errors import FleetError
from rlax_stack.learner import multihost
from rlax_stack.learner.peer_watch import PeerWatch, jax_timeout_s


class _Store:
  def __init__(self):
    self.words = {}

  def key_value_set(self, key, word, *, allow_overwrite):
    assert allow_overwrite
    self.words[key] = word

  def key_value_dir_get(self, folder):
    return [(key, word) for key, word in self.words.items() if key.startswith(folder)]


@pytest.fixture
def job():
  """Three watches over one store, the time, and what ended processes said."""
  store, time, ended = _Store(), [0.0], []
  watches = [
    PeerWatch(store, processes=3, index=i, deadline_s=10.0, end=ended.append, clock=lambda: time[0])
    for i in range(3)
  ]
  return watches, time, ended


def _seconds(time, watches, count):
  for _ in range(count):
    time[0] += 1
    for watch in watches:
      watch.look()


def test_a_hung_process_ends_when_another_is_silent(job):
  watches, time, ended = job
  _seconds(time, watches, 30)
  assert not ended and watches[0].gone() == []
  _seconds(time, watches[:2], 11)
  assert watches[0].gone() == []
  _seconds(time, watches[:2], 1)
  assert watches[0].gone() == [2] and not ended
  _seconds(time, watches[:2], 5)
  said = (
    'process 2 of 3 gave no sign of life for 10 s. Look at its log, then start all processes again'
  )
  assert ended and all(said in message for message in ended)


@pytest.mark.parametrize('deadline', [5, 10, 300])
@pytest.mark.parametrize('phase', [0.0, 0.3, 0.99])
def test_the_watch_speaks_before_jax_may(deadline, phase):
  store, time, ended = _Store(), [0.0], []
  options = {'processes': 2, 'deadline_s': deadline, 'clock': lambda: time[0]}
  here = PeerWatch(store, index=0, end=lambda _: ended.append(time[0]), **options)
  there = PeerWatch(store, index=1, **options)
  there.look()
  died, interval = time[0], deadline / 5
  time[0] = phase * interval  # of the round of the one that lives
  while not ended:
    here.look()
    time[0] += interval
  assert ended[0] - died < jax_timeout_s(deadline) / 2


def test_one_that_leaves_in_order_is_not_missed(job):
  watches, time, ended = job
  _seconds(time, watches, 3)
  watches[2].stop()
  _seconds(time, watches[:2], 60)
  assert not ended and watches[0].gone() == []


def test_errors_of_the_device_get_the_name(job, monkeypatch):
  watches, time, ended = job
  _seconds(time, watches, 1)
  _seconds(time, watches[:2], 12)
  monkeypatch.setattr(multihost, '_watches', [watches[0]])
  with pytest.raises(FleetError, match='process 2 of 3 .*connection closed'):
    with multihost.naming_who_is_gone():
      raise jax.errors.JaxRuntimeError('connection closed')
  _seconds(time, watches[:1], 60)  # the caller says it; nobody ends the process under it
  assert not ended
  monkeypatch.setattr(multihost, '_watches', [])
  with pytest.raises(jax.errors.JaxRuntimeError):
    with multihost.naming_who_is_gone():
      raise jax.errors.JaxRuntimeError('out of memory')
