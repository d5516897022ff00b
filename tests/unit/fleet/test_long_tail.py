"""Slow, long answers: batches come sooner with more groups in flight, and what is trained is what was generated.

A fleet is modelled by events around the real coordinator: slots that are refilled, samples with log-normal lengths
(8-fold between the 5th and the 95th percentile), a learner that takes its time.
"""

import collections
import heapq

import numpy as np
import pytest
from scipy import stats

from rlax_stack.errors import FleetError
from rlax_stack.fleet.lease import Lease

_GROUP, _BATCH, _SLOTS = 4, 4, 16
_MEDIAN, _SIGMA = 100.0, np.log(8) / (2 * 1.645)


def _length(group_id, index):
  random = np.random.default_rng([group_id, index])
  return float(np.exp(np.log(_MEDIAN) + _SIGMA * random.standard_normal()))


class _Fleet:
  """One worker and one learner in modelled time."""

  def __init__(self, coordinator, make_trajectory, *, slots=_SLOTS, train_s=0.0, discard=False):
    self.coordinator, self.make_trajectory = coordinator, make_trajectory
    self.slots, self.train_s, self.discard = slots, train_s, discard
    self.now_s = self.busy_until_s = 0.0
    self.version, self.batch = 0, None
    self.events, self.waiting = [], collections.deque()
    self.leases, self.done = {}, collections.defaultdict(list)
    self.running, self.busy_s = 0, 0.0
    self.batch_times, self.trained = [], []  # trained: (length, staleness)
    coordinator.on_published(0)

  def run(self, batches):
    self._refill()
    while len(self.batch_times) < batches:
      time_s, group_id, index, lease = heapq.heappop(self.events)
      self.busy_s += self.running * (time_s - self.now_s)
      self.now_s = time_s
      if lease is not None:
        self.running -= 1
        self._finish(group_id, index)
      self._learn()
      self._refill()
    self.coordinator.check()

  def _refill(self):
    while self.running + len(self.waiting) < self.slots + 1:
      lease = self.coordinator.lease('w')
      if not isinstance(lease, Lease):
        break
      self.leases[lease.group_id] = lease
      self.waiting.extend((lease, i) for i in range(_GROUP))
    while self.waiting and self.running < self.slots:
      lease, index = self.waiting.popleft()
      self.running += 1
      end_s = self.now_s + _length(lease.group_id, index)
      heapq.heappush(self.events, (end_s, lease.group_id, index, lease))
      self.done[lease.group_id].append((index, self.version))

  def _finish(self, group_id, index):
    lease = self.leases[group_id]
    starts = dict(self.done[group_id])
    finished = self.done[group_id, 'finished']
    finished.append(index)
    if len(finished) == _GROUP:
      del self.leases[group_id]
      sampled = [self.make_trajectory(lease, i, versions=[starts[i]]) for i in range(_GROUP)]
      assert self.coordinator.deliver(lease, sampled)

  def _learn(self):
    if self.batch is not None:
      if self.now_s < self.busy_until_s:
        return
      self.coordinator.mark_trained(self.batch)
      self.batch, self.version = None, self.version + 1
      self.coordinator.on_published(self.version)
    try:
      batch = self.coordinator.next_batch(self.version, timeout_s=0.0)
    except FleetError:
      return
    self.batch, self.busy_until_s = batch, self.now_s + self.train_s
    heapq.heappush(self.events, (self.busy_until_s, -1, len(self.batch_times), None))
    self.batch_times.append(self.now_s)
    self.trained += [
      (_length(t.group_id, t.sample_index), self.version - t.oldest_version)
      for group in batch
      for t in group.trajectories
    ]
    if self.discard:
      self._give_up()

  def _give_up(self):
    for lease in self.leases.values():
      self.coordinator.fail(lease, 'too slow', retry=False)
    self.leases.clear()
    self.waiting.clear()
    self.running, self.events = 0, [event for event in self.events if event[-1] is None]


@pytest.fixture
def fleet(make_coordinator, make_trajectory):
  def make(*, max_staleness, groups_in_flight=0, **options):
    coordinator = make_coordinator(
      group_size=_GROUP,
      groups_per_batch=_BATCH,
      max_staleness=max_staleness,
      groups_in_flight=groups_in_flight,
      lease_timeout_s=1e9,
    )
    return _Fleet(coordinator, make_trajectory, **options)

  return make


def _batch_s(run):
  return float(np.diff(run.batch_times[5:]).mean())


@pytest.mark.parametrize(
  ('max_staleness', 'in_flight', 'train_s'),
  [(1, 6, 0.0), (2, 8, 50.0), (4, 8, 50.0), (4, 0, 0.0)],
)
def test_trained_lengths_are_distributed_as_the_generated_ones(
  fleet, max_staleness, in_flight, train_s
):
  run = fleet(max_staleness=max_staleness, groups_in_flight=in_flight, train_s=train_s)
  run.run(320)
  lengths, staleness = np.array(run.trained).T
  assert len(lengths) == 320 * _BATCH * _GROUP  # 5,120
  independent = [_length(10**6 + i, 0) for i in range(5000)]
  assert stats.ks_2samp(lengths, independent).pvalue > 0.01
  # Nothing is dropped: what was issued is trained or still with the worker.
  counts = run.coordinator.counts()
  in_batch = 0 if run.batch is None else _BATCH * _GROUP
  assert counts['trained'] == len(lengths) - in_batch
  assert counts['issued'] == counts['trained'] + counts['in_flight']
  active = run.coordinator.metrics()['fleet/groups_leased'] + len(run.coordinator._table.ready)
  assert active <= (in_flight or _BATCH * (max_staleness + 1))
  # The long ones are those that were carried over, and none for longer than it may be.
  assert staleness.max() <= max_staleness
  assert lengths[staleness > 0].mean() > lengths[staleness == 0].mean()


def test_dropping_the_unfinished_would_be_seen(fleet):
  """The control: the same measure on a fleet that gives up what is not ready when a batch is."""
  run = fleet(max_staleness=4, groups_in_flight=2 * _BATCH, slots=2 * _SLOTS, discard=True)
  run.run(320)
  independent = [_length(10**6 + i, 0) for i in range(5000)]
  lengths = [length for length, _ in run.trained]
  assert np.mean(lengths) < 0.9 * np.mean(independent)
  assert stats.ks_2samp(lengths, independent).pvalue < 1e-6


def test_batches_come_sooner_with_groups_in_flight_beyond_a_batch(fleet):
  times, occupancy, staleness = {}, {}, {}
  for in_flight in (4, 6, 8, 12, 20):
    run = fleet(max_staleness=4, groups_in_flight=in_flight)
    run.run(150)
    times[in_flight] = _batch_s(run)
    occupancy[in_flight] = run.busy_s / (run.now_s * _SLOTS)
    staleness[in_flight] = np.mean([late for _, late in run.trained])
  assert times[6] < 0.7 * times[4]  # half a batch more: at least 30 % sooner
  assert times[20] <= times[12] < times[8] < times[6]
  assert occupancy[4] < 0.5 and occupancy[20] > 0.95
  # The price of more in flight is age.
  assert staleness[4] <= 1 < staleness[6] < staleness[8] < staleness[12]


def test_on_policy_batches_are_the_groups_in_order_whatever_the_lengths(fleet):
  run = fleet(max_staleness=0, groups_in_flight=_BATCH)
  run.run(20)
  want = [_length(g, i) for g in range(20 * _BATCH) for i in range(_GROUP)]
  assert [length for length, _ in run.trained] == want
