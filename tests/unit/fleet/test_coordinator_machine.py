"""Random lives of a fleet: the account closes at every step, nothing is trained twice, nothing hangs."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlax_stack.errors import FleetError, StaleLeaseError
from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.fleet.lease import Lease
from rlax_stack.types import FinishReason, Message, Prompt, Reward, Trajectory


def _trajectory(lease, index, version, failed):
  return Trajectory(
    group_id=lease.group_id,
    sample_index=index,
    prompt_id=lease.prompt.prompt_id,
    tokens=np.array([5, 6], np.int32),
    source_t=np.array([0, 1], np.int8),
    mask_t=np.array([False, True]),
    behaviour_log_probs_t=np.zeros(2, np.float32),
    raw_log_probs_t=np.zeros(2, np.float32),
    version_t=np.array([-1, version], np.int32),
    finish_reason=FinishReason.STOP,
    reward=Reward(value=None, failure='timed out') if failed else Reward(value=1.0),
  )


def _group(lease, *, version=None, failed=()):
  version = lease.min_version if version is None else version
  return [_trajectory(lease, i, version, i in failed) for i in range(lease.num_samples)]


class _Fleet:
  """A coordinator, its clock and its prompts; `crash` goes back to a saved state as a new process would."""

  def __init__(self, **options):
    self.options = options
    self.now_s = 0.0
    self.next_index = 0
    self.coordinator = self._new()

  def _new(self):
    return Coordinator(
      self._next_prompt,
      group_size=3,
      lease_timeout_s=10.0,
      max_reward_failure_fraction=1.0,
      max_failed_groups_in_row=10**9,
      clock=lambda: self.now_s,
      prompt_state=lambda: self.next_index,
      **self.options,
    )

  def _next_prompt(self):
    self.next_index += 1
    message = Message(role='user', content='?')
    return Prompt(prompt_id=str(self.next_index - 1), messages=(message,), answer='')

  def crash(self, state):
    state = json.loads(state)
    self.next_index = state['prompt_state']
    self.coordinator = self._new()
    self.coordinator.restore(state)


class CoordinatorMachine(RuleBasedStateMachine):
  @initialize(
    staleness=st.integers(0, 2),
    size=st.integers(1, 3),
    extra=st.integers(-1, 6),
    greedy=st.booleans(),
  )
  def start(self, staleness, size, extra, greedy):
    self.staleness, self.size, self.greedy = staleness, size, greedy
    # -1: as many groups as the staleness admits.
    self.in_flight = 0 if extra < 0 else size + min(extra, size * staleness)
    self.fleet = _Fleet(
      max_staleness=staleness,
      groups_per_batch=size,
      groups_in_flight=self.in_flight,
      max_attempts=3,
      greedy=greedy,
    )
    self.version, self.taken = 0, False
    self.leases = []  # every lease ever given, of every process
    self.trained = set()
    self.batch = None
    self.fleet.coordinator.on_published(0)
    self.save()

  @property
  def coordinator(self):
    return self.fleet.coordinator

  def groups(self, status):
    return self.coordinator.metrics()[f'fleet/groups_{status}']

  @rule(worker=st.sampled_from(['a', 'b']))
  def lease(self, worker):
    lease = self.coordinator.lease(worker)
    if isinstance(lease, Lease):
      assert lease.prompt.prompt_id == str(
        lease.group_id
      )  # the same prompt in every attempt and process
      assert (
        lease.min_version == self.version and lease.last_version == self.version + self.staleness
      )
      self.leases.append(lease)

  @precondition(lambda self: self.leases)
  @rule(data=st.data(), failed=st.sets(st.integers(0, 3)), behind=st.booleans())
  def deliver(self, data, failed, behind):
    """Any lease: new, delivered before, expired, given back, or of a process that died."""
    lease = data.draw(st.sampled_from(self.leases))
    before = self.coordinator.counts()
    try:
      new = self.coordinator.deliver(
        lease, _group(lease, version=max(0, lease.min_version - behind), failed=failed)
      )
    except StaleLeaseError:
      new = False
    if not new:
      assert self.coordinator.counts() == before

  @precondition(lambda self: self.leases)
  @rule(data=st.data(), retry=st.booleans(), extend=st.booleans())
  def fail_or_extend(self, data, retry, extend):
    lease = data.draw(st.sampled_from(self.leases))
    try:
      if extend:
        assert self.coordinator.extend(lease).deadline_s == self.fleet.now_s + 10
      else:
        self.coordinator.fail(lease, 'preempted', retry=retry)
    except StaleLeaseError:
      pass

  @rule(seconds=st.sampled_from([1.0, 9.0, 11.0]))
  def wait(self, seconds):
    self.fleet.now_s += seconds

  @precondition(lambda self: not self.taken)
  @rule()
  def next_batch(self):
    try:
      batch = self.coordinator.next_batch(self.version, timeout_s=0)
    except FleetError as error:
      assert 'No batch' in str(error)
      return
    self.consume(batch)

  def consume(self, batch):
    ids = [(t.group_id, t.sample_index) for group in batch for t in group.trajectories]
    assert len(batch) == self.size and [g.group_id for g in batch] == sorted(
      g.group_id for g in batch
    )
    assert len(set(ids)) == len(ids) and not self.trained & set(ids)
    assert all(len(group.trajectories) >= 2 for group in batch)
    assert all((group.greedy is not None) == self.greedy for group in batch)
    assert all(index < 3 for _, index in ids)
    assert all(
      self.version - t.oldest_version <= self.staleness for g in batch for t in g.trajectories
    )
    self.batch, self.taken = batch, True

  @precondition(lambda self: self.batch)
  @rule(skipped=st.booleans())
  def train(self, skipped):
    if skipped:
      self.coordinator.mark_filtered(self.batch)
    else:
      self.coordinator.mark_trained(self.batch)
      self.trained |= {(t.group_id, t.sample_index) for g in self.batch for t in g.trajectories}
    self.batch = None

  @precondition(lambda self: self.batch is None)
  @rule(step=st.sampled_from([1, 1, 1, 2]))
  def publish(self, step):
    self.version += step
    self.taken = False
    self.coordinator.on_published(self.version)

  @rule()
  def save(self):
    saved_taken = self.taken and self.batch is None
    self.saved = (
      json.dumps(self.coordinator.state()), self.version, saved_taken, copy.copy(self.trained)
    )  # fmt: skip

  @rule()
  def crash(self):
    state, self.version, self.taken, trained = self.saved
    self.trained = copy.copy(trained)  # what was trained after the checkpoint is un-trained with it
    self.batch = None
    self.fleet.crash(state)

  @precondition(lambda self: not self.taken)
  @rule()
  def run_one_batch(self):
    """Whatever happened before, honest workers fill a batch: no deadlock."""
    self.fleet.now_s += 11  # every lease held by the dead runs out
    for _ in range(4):
      while isinstance(lease := self.coordinator.lease('honest'), Lease):
        self.leases.append(lease)
        self.coordinator.deliver(lease, _group(lease))
      try:
        return self.consume(self.coordinator.next_batch(self.version, timeout_s=0))
      except FleetError:
        pass  # stale groups were dropped: their places are free now
    raise AssertionError('no batch came')

  @invariant()
  def account_closes(self):
    if not hasattr(self, 'fleet'):
      return
    self.coordinator.check()
    counts = self.coordinator.counts()
    assert counts['issued'] == sum(n for name, n in counts.items() if name != 'issued')
    assert counts['trained'] == len(self.trained)
    groups = {group_id for group_id, _ in self.trained}
    assert counts['baseline'] == (len(groups) if self.greedy else 0)

  @invariant()
  def admission_holds(self):
    if not hasattr(self, 'fleet'):
      return
    active = self.groups('leased') + self.groups('ready')
    assert active <= (self.in_flight or self.size * (self.staleness + 1))
    if active == 0 and (self.staleness or not self.taken):
      # Work can be had whenever nothing is in flight and a batch is still to come.
      probe = _Fleet(**self.fleet.options)
      probe.crash(json.dumps(self.coordinator.state()))
      probe.coordinator.on_published(self.version)
      assert isinstance(probe.coordinator.lease('probe'), Lease)


CoordinatorMachine.TestCase.settings = settings(
  max_examples=40, stateful_step_count=40, deadline=None
)
TestCoordinatorMachine = CoordinatorMachine.TestCase


def _fails(group_id, index):
  """Some verdicts fail, as a pure function of the identity: groups 3, 10, 17, ... lose too many samples."""
  return index < 2 if group_id % 7 == 3 else (group_id + index) % 5 == 0


def _run(draw, *, crashes, versions):
  """Batches of an on-policy run in which workers come, stall, repeat themselves and die at random."""
  fleet = _Fleet(max_staleness=0, groups_per_batch=3, max_attempts=100)
  batches, version, held = [], 0, []
  fleet.coordinator.on_published(0)
  saved = json.dumps(fleet.coordinator.state())
  while version < versions:
    action = str(draw.choice(['lease', 'deliver', 'stall', 'crash'], p=[0.45, 0.45, 0.05, 0.05]))
    if action == 'lease' and isinstance(lease := fleet.coordinator.lease('w'), Lease):
      held.append(lease)
    elif action == 'deliver' and held:
      lease = held[draw.integers(len(held))]
      failed = {i for i in range(3) if _fails(lease.group_id, i)}
      try:
        fleet.coordinator.deliver(lease, _group(lease, failed=failed))
      except StaleLeaseError:
        held.remove(lease)
    elif action == 'stall':
      fleet.now_s += 6
    elif action == 'crash' and crashes:
      fleet.crash(saved)
    try:
      batch = fleet.coordinator.next_batch(version, timeout_s=0)
    except FleetError:
      continue
    batches.append([(g.group_id, [t.sample_index for t in g.trajectories]) for g in batch])
    fleet.coordinator.mark_trained(batch)
    version += 1
    fleet.coordinator.on_published(version)
    if draw.random() < 0.5 or not crashes:
      saved = json.dumps(fleet.coordinator.state())
    elif crashes:
      fleet.crash(saved)
      version = json.loads(saved)['version']
      del batches[version:]
  return batches


def _expected(versions):
  """The same run as a plain loop."""
  batches, group_id = [], 0
  for _ in range(versions):
    batch = []
    while len(batch) < 3:
      usable = [i for i in range(3) if not _fails(group_id, i)]
      if len(usable) >= 2:
        batch.append((group_id, usable))
      group_id += 1
    batches.append(batch)
  return batches


@pytest.mark.parametrize('crashes', [False, True])
@pytest.mark.parametrize('seed', range(12))
def test_on_policy_batches_do_not_depend_on_workers_or_processes(seed, crashes):
  assert _run(np.random.default_rng(seed), crashes=crashes, versions=6) == _expected(6)


@settings(max_examples=30, deadline=None)
@given(staleness=st.integers(0, 3), size=st.integers(1, 3), data=st.data())
def test_slow_groups_are_never_dropped(staleness, size, data):
  """Honest workers, any order of completion, one batch per version: the staleness drop never fires."""
  fleet = _Fleet(max_staleness=staleness, groups_per_batch=size, max_attempts=3)
  held = []
  for version in range(6):
    fleet.coordinator.on_published(version)
    while True:
      for _ in range(data.draw(st.integers(1, 3))):
        if isinstance(lease := fleet.coordinator.lease('w'), Lease):
          held.append(lease)
      if held:
        lease = held.pop(data.draw(st.integers(0, len(held) - 1)))
        fleet.coordinator.deliver(lease, _group(lease))
      try:
        batch = fleet.coordinator.next_batch(version, timeout_s=0)
        break
      except FleetError:
        continue
    fleet.coordinator.mark_trained(batch)
  assert fleet.coordinator.counts()['dropped_stale'] == 0
  assert fleet.coordinator.counts()['trained'] == 6 * 3 * size
