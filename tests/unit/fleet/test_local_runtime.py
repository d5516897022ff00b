"""A worker in a thread: it starts, stops in time, and its errors reach the learner."""

import threading
import time

import numpy as np
import pytest

from rlax_stack.errors import FleetError
from rlax_stack.fleet.lease import Finished, Lease
from rlax_stack.fleet.local_runtime import LocalRuntime
from rlax_stack.fleet.parameter_server import ParameterServer


@pytest.fixture
def coordinator(make_coordinator):
  return make_coordinator(clock=time.monotonic, max_staleness=1)


def _rollout_worker(make_group):
  def worker(coordinator, parameter_server, stop_event):
    name = threading.current_thread().name
    while not stop_event.is_set():
      lease = coordinator.lease(name, timeout_s=0.2)
      if isinstance(lease, Finished):
        return
      if isinstance(lease, Lease):
        version, _ = parameter_server.wait_for(lease.min_version, timeout_s=5)
        coordinator.deliver(lease, make_group(lease, versions=[version, version]))

  return worker


def test_two_workers_and_a_learner(coordinator, make_group):
  server = ParameterServer()
  worker = _rollout_worker(make_group)
  options = dict(coordinator=coordinator, parameter_server=server)
  trained = []
  with (
    LocalRuntime(worker, name='rollout-0', **options),
    LocalRuntime(worker, name='rollout-1', **options),
  ):
    for version in range(20):
      server.publish(version, {'w': np.full(2, version, np.float32)})
      coordinator.on_published(version)
      batch = coordinator.next_batch(version, timeout_s=10)
      assert all(
        version - t.oldest_version in (0, 1) for group in batch for t in group.trajectories
      )
      coordinator.mark_trained(batch)
      trained += [group.group_id for group in batch]
  assert len(set(trained)) == len(trained) == 40
  coordinator.check()
  counts = coordinator.counts()
  assert counts['trained'] == 120 and counts['dropped_stale'] == 0
  assert not [t for t in threading.enumerate() if t.name.startswith('rollout-')]


def test_error_of_the_worker_reaches_the_learner(coordinator):
  def worker(coordinator, parameter_server, stop_event):
    coordinator.lease('w', timeout_s=5)
    raise MemoryError('no room for the KV cache')

  runtime = LocalRuntime(worker, coordinator=coordinator, parameter_server=ParameterServer())
  with pytest.raises(MemoryError, match='no room'):
    with runtime:
      coordinator.on_published(0)
      coordinator.next_batch(0, timeout_s=10)
  assert not runtime.is_alive()


def test_stop_raises_what_the_worker_raised(coordinator):
  def worker(coordinator, parameter_server, stop_event):
    raise ValueError('at once')

  runtime = LocalRuntime(worker, coordinator=coordinator, parameter_server=ParameterServer())
  runtime.start()
  with pytest.raises(ValueError, match='at once'):
    runtime.stop(5)
  runtime.stop(5)


def test_error_of_the_learner_is_not_hidden_by_the_worker(coordinator):
  def worker(coordinator, parameter_server, stop_event):
    raise ValueError('the worker too')

  with pytest.raises(KeyError, match='learner'):
    with LocalRuntime(worker, coordinator=coordinator, parameter_server=ParameterServer()):
      raise KeyError('learner')


def test_worker_that_returns_early_is_an_error(coordinator):
  runtime = LocalRuntime(
    lambda *_: None, coordinator=coordinator, parameter_server=ParameterServer(), name='rollout-7'
  )
  with pytest.raises(FleetError, match='rollout-7 returned while the run goes on'):
    with runtime:
      coordinator.on_published(0)
      coordinator.next_batch(0, timeout_s=10)


def test_worker_that_hangs_is_given_up(coordinator):
  release = threading.Event()
  runtime = LocalRuntime(
    lambda *_: release.wait(10),
    coordinator=coordinator,
    parameter_server=ParameterServer(),
    name='rollout-9',
  )
  runtime.start()
  with pytest.raises(FleetError, match='rollout-9 did not end within 0.05 s'):
    runtime.stop(0.05)
  release.set()
  runtime.stop(5)


def test_stop_wakes_a_worker_that_waits_for_weights(coordinator):
  def worker(coordinator, parameter_server, stop_event):
    parameter_server.wait_for(3, timeout_s=60)

  runtime = LocalRuntime(worker, coordinator=coordinator, parameter_server=ParameterServer())
  runtime.start()
  start_s = time.monotonic()
  runtime.stop(5)
  assert time.monotonic() - start_s < 3


def test_stop_before_start_is_harmless(coordinator):
  LocalRuntime(lambda *_: None, coordinator=coordinator, parameter_server=ParameterServer()).stop(1)
