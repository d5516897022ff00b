"""A group's greedy sample: drawn and scored with the group, never trained on, and accounted for."""

import json

import pytest

from rlax_stack.errors import FleetError
from rlax_stack.fleet.lease import Lease


@pytest.fixture
def coordinator(make_coordinator):
  made = make_coordinator(groups_per_batch=1, greedy=True)
  made.on_published(0)
  return made


def _counts(coordinator):
  coordinator.check()
  return {name: n for name, n in coordinator.counts().items() if n}


def test_it_stands_beside_the_group_and_ends_as_its_baseline(coordinator, make_group):
  lease = coordinator.lease('w')
  assert (lease.group_size, lease.greedy, lease.num_samples) == (3, True, 4)
  assert _counts(coordinator) == {'issued': 4, 'in_flight': 4}
  coordinator.deliver(lease, make_group(lease, failed=[1]))
  (group,) = coordinator.next_batch(0, timeout_s=0)
  assert [t.sample_index for t in group.trajectories] == [0, 2]
  assert group.greedy.sample_index == 3 and group.greedy.group_id == group.group_id
  coordinator.mark_trained([group])
  assert _counts(coordinator) == {'issued': 4, 'trained': 2, 'baseline': 1, 'dropped_failed': 1}
  assert coordinator.metrics()['fleet/baseline'] == 1.0


def test_without_its_verdict_the_group_is_dropped_whole_and_replaced(coordinator, make_group):
  lease = coordinator.lease('w')
  coordinator.deliver(lease, make_group(lease, failed=[3]))
  assert _counts(coordinator) == {'issued': 4, 'dropped_failed': 4}
  assert coordinator.metrics()['fleet/groups_dropped_no_baseline'] == 1.0
  assert coordinator.metrics()['fleet/reward_failures'] == 1.0
  other = coordinator.lease('w')
  assert other.group_id == 1
  coordinator.deliver(other, make_group(other))
  assert [group.group_id for group in coordinator.next_batch(0, timeout_s=0)] == [1]


def test_what_is_not_trained_has_no_baseline(coordinator, make_group):
  lease = coordinator.lease('w')
  coordinator.deliver(lease, make_group(lease))
  coordinator.mark_filtered(coordinator.next_batch(0, timeout_s=0))
  assert _counts(coordinator) == {'issued': 4, 'dropped_filtered': 4}
  coordinator.on_published(1)
  coordinator.lease('w')
  assert coordinator.cancel_in_flight() == 4


def test_a_delivery_without_it_is_refused(coordinator, make_group):
  lease = coordinator.lease('w')
  with pytest.raises(FleetError, match=r'needs samples 0..3 once each, got \[0, 1, 2\]'):
    coordinator.deliver(lease, make_group(lease)[:3])
  assert coordinator.deliver(lease, make_group(lease))


def test_a_restored_group_is_leased_again_with_it(coordinator, make_coordinator, make_group):
  lease = coordinator.lease('w')
  coordinator.deliver(lease, make_group(lease))
  restored = make_coordinator(groups_per_batch=1, greedy=True)
  restored.restore(json.loads(json.dumps(coordinator.state())))
  again = restored.lease('w')
  assert isinstance(again, Lease) and (again.group_id, again.attempt) == (0, 1)
  assert again.greedy and again.prompt == lease.prompt
  restored.deliver(again, make_group(again))
  restored.mark_trained(restored.next_batch(0, timeout_s=0))
  assert _counts(restored) == {'issued': 4, 'trained': 3, 'baseline': 1}


def test_a_group_of_one_is_enough(make_coordinator, make_group):
  coordinator = make_coordinator(group_size=1, min_group_size=1, groups_per_batch=1, greedy=True)
  coordinator.on_published(0)
  lease = coordinator.lease('w')
  coordinator.deliver(lease, make_group(lease))
  (group,) = coordinator.next_batch(0, timeout_s=0)
  assert len(group.trajectories) == 1 and group.greedy is not None
