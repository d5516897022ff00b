"""The ledger: each trajectory ends once, and the sums close."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlax_stack.errors import CheckpointError, FleetError
from rlax_stack.fleet.ledger import Ledger, Outcome


def _ledger(*sizes):
  ledger = Ledger()
  for i, size in enumerate(sizes):
    ledger.issue(i, size)
  return ledger


def _counts(ledger):
  ledger.check()
  return {name: n for name, n in ledger.counts().items() if n}


def test_life_of_a_group():
  ledger = _ledger(2)
  assert _counts(ledger) == {'issued': 2, 'in_flight': 2}
  assert ledger.deliver(0, 0, attempt=0) and ledger.deliver(0, 1, attempt=0)
  ledger.finish(0, 0, Outcome.DROPPED_FAILED)
  assert _counts(ledger) == {'issued': 2, 'in_flight': 1, 'dropped_failed': 1}
  assert ledger.open_groups() == (0,) and not ledger.is_finished(0)
  ledger.finish(0, 1, Outcome.TRAINED)
  assert _counts(ledger) == {'issued': 2, 'dropped_failed': 1, 'trained': 1}
  assert ledger.open_groups() == () and ledger.is_finished(0) and not ledger.is_finished(1)


def test_duplicates_are_counted_and_change_nothing():
  ledger = _ledger(1)
  assert ledger.deliver(0, 0, attempt=0)
  assert not ledger.deliver(0, 0, attempt=0)
  ledger.finish(0, 0, Outcome.TRAINED)
  assert not ledger.deliver(0, 0, attempt=0)
  assert not ledger.deliver(0, 0, attempt=3)
  assert ledger.duplicates == 3
  assert _counts(ledger) == {'issued': 1, 'trained': 1}


def test_late_twin_of_an_earlier_attempt_is_a_duplicate():
  ledger = _ledger(1)
  assert ledger.reissue(0) == 1 and ledger.attempt(0) == 1
  assert not ledger.deliver(0, 0, attempt=0)
  assert ledger.deliver(0, 0, attempt=1)
  assert ledger.duplicates == 1


@pytest.mark.parametrize(
  ('act', 'message'),
  [
    (lambda ledger: ledger.issue(5, 1), 'expected 1, got 5'),
    (lambda ledger: ledger.issue(0, 1), 'expected 1, got 0'),
    (lambda ledger: ledger.issue(1, 0), 'group_size=0'),
    (lambda ledger: ledger.finish(0, 0, Outcome.TRAINED), 'never delivered'),
    (lambda ledger: ledger.finish(0, 0, Outcome.DROPPED_STALE), 'never delivered'),
    (lambda ledger: ledger.finish(0, 2, Outcome.CANCELLED), 'no sample 2'),
    (lambda ledger: ledger.finish(9, 0, Outcome.CANCELLED), 'never issued'),
    (lambda ledger: ledger.deliver(0, 0, attempt=1), 'attempt 1 was never issued'),
    (lambda ledger: ledger.deliver(3, 0, attempt=0), 'never issued'),
  ],
)
def test_what_cannot_be_raises(act, message):
  ledger = _ledger(2)
  with pytest.raises(FleetError, match=message):
    act(ledger)
  assert _counts(ledger) == {'issued': 2, 'in_flight': 2}


def test_nothing_ends_twice():
  ledger = _ledger(2)
  ledger.deliver(0, 0, attempt=0)
  ledger.finish(0, 0, Outcome.TRAINED)
  with pytest.raises(FleetError, match='already ended as trained'):
    ledger.finish(0, 0, Outcome.TRAINED)
  assert ledger.finish_group(0, Outcome.CANCELLED) == 1
  with pytest.raises(FleetError, match='has ended'):
    ledger.finish(0, 1, Outcome.CANCELLED)
  with pytest.raises(FleetError, match='has ended'):
    ledger.reissue(0)


def test_a_delivered_group_is_not_issued_again():
  ledger = _ledger(1)
  ledger.deliver(0, 0, attempt=0)
  with pytest.raises(FleetError, match='was delivered'):
    ledger.reissue(0)


def test_restore_reopens_what_was_not_finished():
  ledger = _ledger(2, 3, 1)
  for i in range(3):
    ledger.deliver(1, i, attempt=0)
  ledger.finish(
    1, 0, Outcome.DROPPED_FAILED
  )  # its group is not finished: in flight again after a restore
  ledger.finish_group(2, Outcome.CANCELLED)
  restored = Ledger()
  restored.restore(json.loads(json.dumps(ledger.state())))
  assert _counts(restored) == {'issued': 6, 'in_flight': 5, 'cancelled': 1}
  assert restored.next_group_id == 3 and restored.open_groups() == (0, 1)
  assert restored.reissue(1) == 1 and restored.deliver(1, 0, attempt=1)
  assert restored.is_finished(2)


@pytest.mark.parametrize(
  'change',
  [
    {'open': [[7, 2, 0]]},
    {'closed': {}},
    {'next_group_id': 'x'},
    {'open': None},
    {'open': [[0, 1]]},
  ],
)
def test_malformed_state_is_refused(change):
  with pytest.raises(CheckpointError, match='ledger in the checkpoint'):
    Ledger().restore(_ledger(2).state() | change)


def test_memory_follows_open_groups_only():
  ledger = Ledger()
  for i in range(5000):
    ledger.issue(i, 2)
    ledger.finish_group(i, Outcome.CANCELLED)
  assert len(json.dumps(ledger.state())) < 300
  assert ledger.is_finished(4321) and _counts(ledger) == {'issued': 10000, 'cancelled': 10000}


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([*Outcome]), st.booleans()),
    max_size=40,
  )
)
def test_sums_close_under_any_calls(calls):
  ledger = _ledger(1, 2, 3, 1)
  ends = {}
  for group_id, index, outcome, delivers in calls:
    try:
      if delivers:
        ledger.deliver(group_id, index, attempt=0)
      ledger.finish(group_id, index, outcome)
      assert (group_id, index) not in ends
      ends[group_id, index] = outcome
    except FleetError:
      pass
    counts = _counts(ledger)
    assert counts.get('in_flight', 0) == 7 - len(ends)
    assert all(counts.get(o, 0) == [*ends.values()].count(o) for o in Outcome)
