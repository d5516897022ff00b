"""The coordinator call by call: leases, deliveries, batches, errors."""

import dataclasses

import pytest

from rlax_stack.errors import FleetError, RewardError, StaleLeaseError
from rlax_stack.fleet.lease import Finished, Lease, Wait
from rlax_stack.types import FinishReason


def _lease_all(coordinator, worker='w'):
  leases = []
  while isinstance(lease := coordinator.lease(worker), Lease):
    leases.append(lease)
  return leases


def _ids(groups):
  return [group.group_id for group in groups]


def test_nothing_is_leased_before_weights_exist(make_coordinator):
  coordinator = make_coordinator()
  assert coordinator.lease('w') == Wait(reason='no weights are published yet')


def test_lease_says_all_that_a_worker_needs(make_coordinator, clock):
  coordinator = make_coordinator(max_staleness=1)
  coordinator.on_published(4)
  lease = coordinator.lease('w')
  assert (lease.group_id, lease.group_size, lease.attempt, lease.worker_id) == (0, 3, 0, 'w')
  assert (lease.min_version, lease.last_version, lease.deadline_s) == (4, 5, clock.now_s + 10)
  assert lease.prompt.prompt_id == '0'


@pytest.mark.parametrize('staleness', [0, 1, 3])
def test_admission_never_exceeds_what_can_be_consumed(make_coordinator, make_group, staleness):
  coordinator = make_coordinator(max_staleness=staleness)
  coordinator.on_published(0)
  leases = _lease_all(coordinator)
  assert len(leases) == 2 * (staleness + 1)
  assert 'are active' in coordinator.lease('w').reason
  for lease in leases:
    coordinator.deliver(lease, make_group(lease))
  batch = coordinator.next_batch(0, timeout_s=0)
  assert isinstance(coordinator.lease('w'), Wait)  # the places of this batch are used
  coordinator.mark_trained(batch)
  coordinator.on_published(1)
  assert len(_lease_all(coordinator)) == 2


def test_on_policy_batch_is_in_order_of_group_id(make_coordinator, make_group):
  coordinator = make_coordinator(groups_per_batch=3)
  coordinator.on_published(0)
  for lease in reversed(_lease_all(coordinator)):
    assert coordinator.deliver(lease, make_group(lease)[::-1])
  batch = coordinator.next_batch(0, timeout_s=0)
  assert _ids(batch) == [0, 1, 2]
  assert [t.sample_index for t in batch[1].trajectories] == [0, 1, 2]
  assert batch[2].prompt.prompt_id == '2' and batch[0].prompt_tokens.tolist() == [7, 8]
  coordinator.mark_trained(batch)
  assert coordinator.counts()['trained'] == 9


def test_the_likely_batch_is_the_next_one_and_is_not_taken(make_coordinator, make_group):
  coordinator = make_coordinator(max_staleness=1)
  coordinator.on_published(0)
  leases = _lease_all(coordinator)  # four groups, two to a batch
  coordinator.deliver(leases[1], make_group(leases[1]))
  assert coordinator.likely_batch(0) is None
  for lease in (leases[3], leases[0]):
    coordinator.deliver(lease, make_group(lease))
  likely = coordinator.likely_batch(0)
  first = coordinator.next_batch(0, timeout_s=0)
  assert _ids(first) == [1, 3] and all(a is b for a, b in zip(first, likely, strict=True))
  assert coordinator.likely_batch(1) is None  # group 2, of version 0, cannot wait beyond version 1
  coordinator.deliver(leases[2], make_group(leases[2]))
  likely = coordinator.likely_batch(1)
  coordinator.mark_trained(first)
  coordinator.on_published(1)
  assert [*map(id, coordinator.next_batch(1, timeout_s=0))] == [*map(id, likely)]
  coordinator.close()
  assert coordinator.likely_batch(2) is None


def test_a_failed_sample_is_dropped_and_its_group_kept(make_coordinator, make_group):
  coordinator = make_coordinator(groups_per_batch=1)
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  coordinator.deliver(lease, make_group(lease, failed=[1]))
  (group,) = coordinator.next_batch(0, timeout_s=0)
  assert [t.sample_index for t in group.trajectories] == [0, 2]
  coordinator.mark_trained([group])
  assert coordinator.counts() == {
    'issued': 3, 'in_flight': 0, 'trained': 2, 'dropped_stale': 0, 'dropped_failed': 1, 'dropped_filtered': 0,
    'cancelled': 0, 'baseline': 0,
  }  # fmt: skip


def test_a_group_with_too_few_samples_is_dropped_whole_and_replaced(make_coordinator, make_group):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  first, second = _lease_all(coordinator)
  coordinator.deliver(first, make_group(first, failed=[0, 2]))
  (third,) = _lease_all(coordinator)
  assert third.group_id == 2
  for lease in (third, second):
    coordinator.deliver(lease, make_group(lease))
  assert _ids(coordinator.next_batch(0, timeout_s=0)) == [1, 2]
  assert coordinator.counts()['dropped_failed'] == 3
  assert coordinator.metrics()['fleet/groups_dropped_too_few_usable'] == 1


@pytest.mark.parametrize(
  'options', [{'value': float('nan')}, {'reason': FinishReason.ABORT}, {'versions': []}]
)
def test_what_cannot_be_trained_on_is_dropped(
  make_coordinator, make_group, make_trajectory, options
):
  coordinator = make_coordinator(groups_per_batch=1)
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  coordinator.deliver(lease, make_group(lease)[:2] + [make_trajectory(lease, 2, **options)])
  (group,) = coordinator.next_batch(0, timeout_s=0)
  assert len(group.trajectories) == 2


def test_duplicate_delivery_is_a_counted_no_op(make_coordinator, make_group):
  coordinator = make_coordinator(groups_per_batch=1)
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  assert coordinator.deliver(lease, make_group(lease))
  assert not coordinator.deliver(lease, make_group(lease))
  batch = coordinator.next_batch(0, timeout_s=0)
  assert not coordinator.deliver(lease, make_group(lease))
  coordinator.mark_trained(batch)
  assert not coordinator.deliver(lease, make_group(lease))
  coordinator.fail(lease, 'too late to matter')
  assert coordinator.counts()['trained'] == 3 and coordinator.metrics()['fleet/duplicates'] == 3


def test_expired_lease_is_given_to_another_worker_and_the_zombie_is_fenced(
  make_coordinator, make_group, clock
):
  coordinator = make_coordinator(groups_per_batch=1)
  coordinator.on_published(0)
  old = coordinator.lease('zombie')
  clock.now_s += 10
  new = coordinator.lease('w')
  assert (new.group_id, new.attempt, new.prompt) == (0, 1, old.prompt) and new.token != old.token
  for call in (lambda: coordinator.deliver(old, make_group(old)), lambda: coordinator.extend(old)):
    with pytest.raises(StaleLeaseError, match=r'group 0 \(attempt 0, worker zombie\) is over'):
      call()
  with pytest.raises(StaleLeaseError):
    coordinator.fail(old, 'late')
  assert coordinator.deliver(new, make_group(new))
  metrics = coordinator.metrics()
  assert (metrics['fleet/lease_expiries'], metrics['fleet/stale_leases']) == (1, 3)


def test_expired_lease_that_nobody_took_may_still_deliver_or_revive(
  make_coordinator, make_group, clock
):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  first, second = _lease_all(coordinator)
  clock.now_s += 10
  with pytest.raises(FleetError, match='2 to be leased again'):
    coordinator.next_batch(0, timeout_s=0)
  assert coordinator.deliver(first, make_group(first))
  extended = coordinator.extend(second)
  assert extended.deadline_s == clock.now_s + 10
  assert isinstance(coordinator.lease('other'), Wait)
  assert coordinator.deliver(extended, make_group(second))


def test_heartbeats_keep_a_lease(make_coordinator, clock):
  coordinator = make_coordinator(groups_per_batch=1)
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  for _ in range(5):
    clock.now_s += 8
    lease = coordinator.extend(lease)
  assert isinstance(coordinator.lease('other'), Wait)


def test_failed_lease_is_retried_then_dropped(make_coordinator):
  coordinator = make_coordinator(groups_per_batch=1, max_attempts=2)
  coordinator.on_published(0)
  for attempt in range(2):
    lease = coordinator.lease('w')
    assert (lease.group_id, lease.attempt) == (0, attempt)
    coordinator.fail(lease, 'out of memory')
  assert coordinator.lease('w').group_id == 1
  assert coordinator.counts()['dropped_failed'] == 3
  assert coordinator.metrics()['fleet/groups_dropped_worker_failed'] == 1


def test_lease_that_was_given_back_cannot_deliver(make_coordinator, make_group):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  coordinator.fail(lease, 'preempted')
  with pytest.raises(StaleLeaseError):
    coordinator.deliver(lease, make_group(lease))


def test_fail_without_retry_drops_at_once(make_coordinator):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  coordinator.fail(coordinator.lease('w'), 'prompt too long', retry=False)
  assert coordinator.lease('w').group_id == 1


def test_stale_group_is_dropped_whole_and_replaced(make_coordinator, make_group):
  coordinator = make_coordinator(groups_per_batch=1, max_staleness=1)
  coordinator.on_published(0)
  first, second = _lease_all(coordinator)
  coordinator.on_published(1)
  coordinator.deliver(second, make_group(second, versions=[1, 1]))
  coordinator.deliver(first, make_group(first, versions=[0, 1]))
  coordinator.on_published(2)
  assert _ids(coordinator.next_batch(2, timeout_s=0)) == [1]
  assert coordinator.counts()['dropped_stale'] == 3
  metrics = coordinator.metrics()
  for name in ('staleness_mean', 'staleness_max', 'staleness_max_ever'):
    assert metrics[f'fleet/{name}'] == 1.0
  assert [lease.group_id for lease in _lease_all(coordinator)] == [2]


def test_slow_group_is_waited_for_in_its_last_version(make_coordinator, make_group):
  coordinator = make_coordinator(groups_per_batch=1, max_staleness=1)
  coordinator.on_published(0)
  slow, fast = _lease_all(coordinator)
  coordinator.deliver(fast, make_group(fast))
  coordinator.mark_trained(coordinator.next_batch(0, timeout_s=0))
  coordinator.on_published(1)
  other = coordinator.lease('w')
  coordinator.deliver(other, make_group(other))
  with pytest.raises(FleetError, match='No batch for version 1'):
    coordinator.next_batch(1, timeout_s=0)
  coordinator.deliver(slow, make_group(slow))
  assert _ids(coordinator.next_batch(1, timeout_s=0)) == [slow.group_id]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda group: group[:2], r'needs samples 0..2 once each, got \[0, 1\]'),
    (lambda group: group[:2] + group[1:2], r'got \[0, 1, 1\]'),
    (
      lambda group: [dataclasses.replace(group[0], group_id=5), *group[1:]],
      r'groups \[5\] were delivered',
    ),
    (
      lambda group: [dataclasses.replace(group[0], reward=None), *group[1:]],
      r'Samples \[0\] of group 0 have no reward',
    ),
  ],
)
def test_malformed_delivery_is_refused_and_the_lease_stays(
  make_coordinator, make_group, change, message
):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  with pytest.raises(FleetError, match=message):
    coordinator.deliver(lease, change(make_group(lease)))
  coordinator.check()
  assert coordinator.deliver(lease, make_group(lease))


def test_samples_with_different_prompts_are_refused(make_coordinator, make_group, make_trajectory):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  with pytest.raises(FleetError, match='same prompt tokens'):
    coordinator.deliver(lease, make_group(lease)[:2] + [make_trajectory(lease, 2, prompt=(7, 9))])


def test_failing_verifiers_stop_learner_and_worker(make_coordinator, make_group):
  coordinator = make_coordinator(max_reward_failure_fraction=0.1, reward_failure_window=6)
  coordinator.on_published(0)
  first, second = _lease_all(coordinator)
  coordinator.deliver(first, make_group(first, failed=[0]))
  with pytest.raises(RewardError, match='1 of the last 6 verdicts failed'):
    coordinator.deliver(second, make_group(second))
  with pytest.raises(RewardError):
    coordinator.next_batch(0, timeout_s=0)
  assert isinstance(coordinator.lease('w'), Finished)


def test_prompts_used_up(make_coordinator, make_group):
  coordinator = make_coordinator(end=3)
  coordinator.on_published(0)
  for lease in _lease_all(coordinator):
    coordinator.deliver(lease, make_group(lease))
  coordinator.mark_trained(coordinator.next_batch(0, timeout_s=0))
  coordinator.on_published(1)
  last = coordinator.lease('w')
  assert not coordinator.is_finished
  assert coordinator.lease('w') == Finished(reason='the prompts are used up; 1 groups are active')
  assert coordinator.is_finished
  assert coordinator.next_batch(1, timeout_s=0) == []
  assert not coordinator.deliver(last, make_group(last))
  counts = coordinator.counts()
  assert (counts['trained'], counts['cancelled'], counts['in_flight']) == (6, 3, 0)


def test_last_groups_are_waited_for_when_prompts_are_used_up(make_coordinator, make_group):
  coordinator = make_coordinator(end=2, max_staleness=1)
  coordinator.on_published(0)
  leases = [coordinator.lease('w'), coordinator.lease('w')]
  assert coordinator.lease('w') == Wait(reason='the prompts are used up; 2 groups are active')
  for lease in leases:
    coordinator.deliver(lease, make_group(lease))
  assert _ids(coordinator.next_batch(0, timeout_s=0)) == [0, 1]


def test_broken_prompt_source_stops_the_run(make_coordinator):
  def broken():
    raise OSError('disk gone')

  coordinator = make_coordinator(prompts=broken, prompt_state=None)
  coordinator.on_published(0)
  with pytest.raises(OSError, match='disk gone'):
    coordinator.lease('w')
  with pytest.raises(OSError, match='disk gone'):
    coordinator.next_batch(0, timeout_s=0)


def test_order_of_learner_calls_is_checked(make_coordinator, make_group):
  coordinator = make_coordinator(groups_per_batch=1)
  with pytest.raises(FleetError, match=r'next_batch\(0\) at version None'):
    coordinator.next_batch(0, timeout_s=0)
  coordinator.on_published(2)
  coordinator.on_published(2)
  with pytest.raises(FleetError, match='1 came after 2'):
    coordinator.on_published(1)
  lease = coordinator.lease('w')
  coordinator.deliver(lease, make_group(lease))
  batch = coordinator.next_batch(2, timeout_s=0)
  with pytest.raises(FleetError, match='whose batch was taken'):
    coordinator.next_batch(2, timeout_s=0)
  coordinator.mark_trained(batch)
  with pytest.raises(FleetError, match='not with the learner'):
    coordinator.mark_trained(batch)


def test_skipped_batch_is_counted_as_filtered(make_coordinator, make_group):
  coordinator = make_coordinator(groups_per_batch=1)
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  coordinator.deliver(lease, make_group(lease))
  coordinator.mark_filtered(coordinator.next_batch(0, timeout_s=0))
  assert coordinator.counts()['dropped_filtered'] == 3


def test_close_and_cancel(make_coordinator, make_group):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  coordinator.close()
  assert coordinator.lease('w') == Finished(reason='the run ended')
  assert coordinator.next_batch(0, timeout_s=0) == []
  assert not coordinator.deliver(lease, make_group(lease))
  assert coordinator.counts()['in_flight'] == 3  # a checkpoint would lease it again
  assert coordinator.cancel_in_flight() == 3
  assert coordinator.counts()['cancelled'] == 3
  coordinator.close(ValueError('first'))
  coordinator.close(ValueError('second'))
  with pytest.raises(ValueError, match='first'):
    coordinator.next_batch(0, timeout_s=0)


@pytest.mark.parametrize(
  'options',
  [
    {'group_size': 1},
    {'groups_per_batch': 0},
    {'max_staleness': -1},
    {'lease_timeout_s': 0.0},
    {'max_attempts': 0},
  ],
)
def test_impossible_sizes_are_refused(make_coordinator, options):
  with pytest.raises(ValueError, match='must be|Need'):
    make_coordinator(**options)
