"""The staleness rule: every admitted group has a place in time, however slow it is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlax_stack.fleet.admission import AdmissionRule


@pytest.mark.parametrize(
  ('version', 'next_batch', 'staleness', 'expected'),
  [(0, 0, 0, 4), (0, 1, 0, 0), (3, 3, 1, 8), (3, 4, 1, 4), (3, 5, 0, 0)],
)
def test_capacity(version, next_batch, staleness, expected):
  rule = AdmissionRule(groups_per_batch=4, max_staleness=staleness)
  assert rule.capacity(version=version, next_batch_version=next_batch) == expected


@pytest.mark.parametrize(
  ('next_batch', 'in_flight', 'expected'), [(3, 8, 8), (3, 6, 6), (3, 5, 5), (4, 6, 4), (5, 6, 0)]
)
def test_groups_in_flight_bound_the_capacity(next_batch, in_flight, expected):
  rule = AdmissionRule(groups_per_batch=4, max_staleness=1, groups_in_flight=in_flight)
  assert rule.capacity(version=3, next_batch_version=next_batch) == expected


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ((0, 0, 0), 'groups_per_batch >= 1'),
    ((4, -1, 0), 'max_staleness >= 0'),
    ((4, 1, 3), 'from groups_per_batch=4 .* = 8, got 3'),
    ((4, 1, 9), '= 8, got 9'),
    ((4, 0, 5), '= 4, got 5'),
  ],
)
def test_sizes_that_cannot_work_are_refused(sizes, message):
  batch, staleness, in_flight = sizes
  with pytest.raises(ValueError, match=message):
    AdmissionRule(groups_per_batch=batch, max_staleness=staleness, groups_in_flight=in_flight)


def _choose(ready, last_versions, *, version=0, max_staleness=1, size=2):
  rule = AdmissionRule(groups_per_batch=size, max_staleness=max_staleness)
  return rule.choose(ready, last_versions, version=version)


def test_completion_order_decides_and_ids_sort():
  assert _choose([3, 0, 1], {0: 1, 1: 1, 3: 1}) == [0, 3]


def test_too_few_ready_waits():
  assert _choose([3], {3: 1, 4: 1}) is None


def test_a_group_in_its_last_version_goes_first():
  assert _choose([5, 6, 1], {1: 0, 5: 1, 6: 1}) == [1, 5]


def test_a_leased_group_in_its_last_version_is_waited_for():
  assert _choose([5, 6], {1: 0, 5: 1, 6: 1}) is None


def test_later_batches_keep_room_for_slow_groups():
  # Three groups end at version 1; only two places are left after this batch, so one of them must go now.
  last_versions = {0: 1, 1: 1, 2: 1, 7: 2, 8: 2}
  assert _choose([7, 8], last_versions, max_staleness=2) is None
  assert _choose([7, 8, 2], last_versions, max_staleness=2) == [2, 7]


def test_hopeless_leases_are_not_waited_for():
  assert _choose([5, 6], {1: 3, 5: 5, 6: 5}, version=4) == [5, 6]


@settings(max_examples=150, deadline=None)
@given(staleness=st.integers(0, 3), size=st.integers(1, 3), data=st.data())
def test_no_group_is_ever_dropped_for_slowness(staleness, size, data):
  """Random leases and random order of completion: each group is consumed within its bound, and no batch hangs."""
  next_id, last_versions, ready = 0, {}, []
  in_flight = data.draw(st.sampled_from([0, *range(size, size * (staleness + 1) + 1)]))
  rule = AdmissionRule(groups_per_batch=size, max_staleness=staleness, groups_in_flight=in_flight)
  for version in range(8):
    batch = None
    while batch is None:
      assert all(last >= version for last in last_versions.values())
      places = rule.capacity(version=version, next_batch_version=version)
      assert len(last_versions) <= places
      for _ in range(data.draw(st.integers(0, places - len(last_versions)))):
        last_versions[next_id] = version + staleness
        next_id += 1
      leased = [i for i in last_versions if i not in ready]
      if leased:
        ready.append(data.draw(st.sampled_from(leased)))
      elif len(last_versions) < places and len(ready) < size:
        last_versions[next_id] = version + staleness
        next_id += 1
      batch = rule.choose(ready, last_versions, version=version)
      assert leased or batch is not None or len(ready) < size
    assert len(set(batch)) == size and batch == sorted(batch)
    for i in batch:
      ready.remove(i)
      assert version <= last_versions.pop(i)
