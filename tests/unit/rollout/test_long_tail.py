"""Slots stay full and half-done samples go on when weights change: scheduler and worker, counted on the real engine."""

import concurrent.futures
import dataclasses
import threading
from unittest import mock

import numpy as np
import pytest

from rlax_stack.errors import FleetError
from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.worker import RolloutWorker
from rlax_stack.types import Message, Prompt, Reward, SamplingParams

_GROUP, _BATCH, _STEPS = 4, 2, 12


def _length(group_id, index):
  """Sampled tokens: log-normal, 8-fold between the 5th and the 95th percentile, cut at the engine's 24."""
  random = np.random.default_rng([group_id, index])
  return int(np.clip(np.exp(np.log(7) + 0.632 * random.standard_normal()), 1, 24))


class _Lengths(Scheduler):
  """Samples end at modelled lengths."""

  def submit(self, request):
    length = _length(*request.identity)
    super().submit(
      dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, max_tokens=length)
      )
    )


class _Tokenizer:
  stop_token_ids = ()

  def encode_chat(self, messages):
    return np.arange(1, 1 + len(messages[0].content), dtype=np.int32)

  def decode(self, ids):
    return ' '.join(str(i) for i in ids)


class _AtOnce(concurrent.futures.Executor):
  """Scoring and loading take no time, so that what is counted does not depend on the machine."""

  def __init__(self, *unused):
    pass

  def submit(self, fn, /, *args, **kwargs):
    done = concurrent.futures.Future()
    done.set_result(fn(*args, **kwargs))
    return done


class _Lockstep:
  """The coordinator with a learner that trains at once: a batch is taken before the worker's next lease."""

  def __init__(self, coordinator, server, params):
    self._coordinator, self._server, self._params = coordinator, server, params
    self.version, self.batches, self.stop = 0, [], threading.Event()
    self._publish()

  def _publish(self):
    self._server.publish(self.version, self._params(self.version % 3))
    self._coordinator.on_published(self.version)

  def lease(self, worker_id, *, timeout_s=0.0):
    if len(self.batches) < _STEPS:
      self._train()
    else:
      self.stop.set()
    return self._coordinator.lease(worker_id, timeout_s=timeout_s)

  def _train(self):
    try:
      groups = self._coordinator.next_batch(self.version, timeout_s=0.0)
    except FleetError:
      return  # no batch yet
    self._coordinator.mark_trained(groups)
    self.batches.append(groups)
    self.version += 1
    self._publish()

  def __getattr__(self, name):
    return getattr(self._coordinator, name)


def _run(tiny, *, max_staleness, groups_in_flight, swap_mode='in_place'):
  contents = iter(range(10**6))
  coordinator = Coordinator(
    lambda: Prompt(
      prompt_id=str(number := next(contents)),
      messages=(Message(role='user', content='x' * (5 + number % 3)),),
      answer='',
    ),
    group_size=_GROUP,
    groups_per_batch=_BATCH,
    max_staleness=max_staleness,
    groups_in_flight=groups_in_flight,
    lease_timeout_s=600.0,
  )
  server = ParameterServer()
  learner = _Lockstep(coordinator, server, tiny.params)
  with mock.patch.object(concurrent.futures, 'ThreadPoolExecutor', _AtOnce):
    worker = RolloutWorker(
      _Lengths(tiny.engine(), swap_mode=swap_mode),
      tokenizer=_Tokenizer(),
      score=lambda texts, prompts: [Reward(value=1.0) for _ in texts],
      sampling=SamplingParams(max_tokens=24),
    )
    worker(learner, server, learner.stop)
  coordinator.check()
  return learner, worker


def test_slots_stay_full_and_every_group_is_trained_as_it_was_generated(tiny):
  learner, worker = _run(tiny, max_staleness=6, groups_in_flight=5 * _BATCH)
  stats = worker.scheduler.stats
  assert stats.row_steps / stats.slot_steps > 0.9
  trajectories = [t for groups in learner.batches for g in groups for t in g.trajectories]
  assert len(trajectories) == _STEPS * _BATCH * _GROUP
  for t in trajectories:  # slow or fast, none was cut short by new weights
    assert t.num_sampled == _length(t.group_id, t.sample_index)
  late = [t for t in trajectories if t.oldest_version < t.newest_version]
  assert late and stats.carried_samples >= len(late)
  assert np.mean([t.num_sampled for t in late]) > np.mean([t.num_sampled for t in trajectories])
  for version, groups in enumerate(learner.batches):
    assert all(0 <= version - t.oldest_version <= 6 for g in groups for t in g.trajectories)
  counts = learner.counts()
  assert counts['trained'] == len(trajectories)
  assert counts['issued'] == counts['trained'] + counts['in_flight']


def test_steps_of_decoding_a_batch_fall_with_groups_in_flight(tiny):
  steps, occupancy = {}, {}
  for in_flight in (_BATCH, 3 * _BATCH):
    _, worker = _run(tiny, max_staleness=3, groups_in_flight=in_flight)
    stats = worker.scheduler.stats
    steps[in_flight], occupancy[in_flight] = stats.decode_steps, stats.row_steps / stats.slot_steps
  assert steps[3 * _BATCH] < 0.7 * steps[_BATCH]
  assert occupancy[_BATCH] < 0.6 and occupancy[3 * _BATCH] > 0.8


@pytest.mark.parametrize(('mode', 'carried'), [('in_place', 2), ('retract', 2), ('drain', 0)])
def test_half_done_samples_are_counted_when_weights_change(tiny, mode, carried):
  scheduler = tiny.scheduler(swap_mode=mode)
  for index in range(2):
    scheduler.submit(tiny.request(0, index))
  scheduler.step()
  scheduler.submit(tiny.request(1, 0))  # has no token yet
  scheduler.swap_params(tiny.params(1), 1)
  while scheduler.has_work:
    scheduler.step()
  assert (scheduler.version, scheduler.stats.carried_samples) == (1, carried)


def test_occupancy_counts_rows_of_decode_steps(tiny):
  scheduler = tiny.scheduler()
  scheduler.generate_all([tiny.request(0, 0, max_tokens=5), tiny.request(0, 1, max_tokens=9)])
  stats = scheduler.stats
  # The first token comes from the prompt's logits; 4 + 8 are decoded, in 8 steps of 8 slots.
  assert (stats.row_steps, stats.decode_steps, stats.slot_steps) == (12, 8, 64)


def test_somebody_waits_for_a_slot(tiny):
  scheduler = tiny.scheduler()
  assert scheduler.free_capacity == tiny.SIZES.slots + 1
  for index in range(tiny.SIZES.slots):
    scheduler.submit(tiny.request(0, index))
  scheduler.step()
  assert (scheduler.num_running, scheduler.num_waiting, scheduler.free_capacity) == (8, 0, 1)
  scheduler.submit(tiny.request(1, 0))
  assert scheduler.free_capacity == 0


def test_figures_are_of_the_time_since_the_last_call(tiny):
  worker = RolloutWorker(
    tiny.scheduler(),
    tokenizer=_Tokenizer(),
    score=lambda texts, prompts: [],
    sampling=SamplingParams(max_tokens=8),
  )
  requests = [tiny.request(0, i, max_tokens=9) for i in range(4)]
  worker.generate_all(requests)
  assert worker.figures() == {
    'rollout/slot_occupancy': 0.5,
    'rollout/samples_carried': 0.0,
    'rollout/swap_s': 0.0,
  }
  assert 'rollout/slot_occupancy' not in worker.figures()  # nothing was decoded since
  worker.generate_all(requests[:2])
  assert worker.figures()['rollout/slot_occupancy'] == 0.25
