"""The coordinator over time: restore, closing while others wait, and a fleet gone quiet."""

import json
import threading
import time

import pytest

from rlax_stack.data.prompt_history import HistorySettings, PromptHistory
from rlax_stack.errors import CheckpointError, FleetError, StaleLeaseError
from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.fleet.lease import Finished, Lease, Wait
from rlax_stack.types import Message, Prompt


def _lease_all(coordinator, worker='w'):
  leases = []
  while isinstance(lease := coordinator.lease(worker), Lease):
    leases.append(lease)
  return leases


def _ids(groups):
  return [group.group_id for group in groups]


def test_restore_leases_unfinished_groups_again_first(make_coordinator, make_group):
  coordinator = make_coordinator(max_staleness=1)
  coordinator.on_published(0)
  leases = _lease_all(coordinator)
  for lease in leases[:3]:
    coordinator.deliver(lease, make_group(lease))
  coordinator.mark_trained(coordinator.next_batch(0, timeout_s=0))
  coordinator.on_published(1)
  state = json.loads(json.dumps(coordinator.state()))
  assert state['prompt_state'] == 4
  restored = make_coordinator(max_staleness=1)
  for _ in range(state['prompt_state']):
    restored._next_prompt()
  restored.restore(state)
  assert restored.counts() == coordinator.counts()
  again = _lease_all(restored)
  assert [(lease.group_id, lease.attempt) for lease in again] == [(2, 1), (3, 1), (4, 0), (5, 0)]
  assert again[0].prompt == leases[2].prompt
  with pytest.raises(StaleLeaseError):  # a worker of the process before
    restored.deliver(leases[3], make_group(leases[3]))


def test_a_batch_taken_but_not_trained_is_done_again_after_restore(make_coordinator, make_group):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  for lease in _lease_all(coordinator):
    coordinator.deliver(lease, make_group(lease))
  coordinator.next_batch(0, timeout_s=0)
  restored = make_coordinator()
  restored.restore(coordinator.state())
  for lease in _lease_all(restored):
    restored.deliver(lease, make_group(lease))
  assert _ids(restored.next_batch(0, timeout_s=0)) == [0, 1]


def test_restore_between_training_and_publishing(make_coordinator, make_group):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  for lease in _lease_all(coordinator):
    coordinator.deliver(lease, make_group(lease))
  coordinator.mark_trained(coordinator.next_batch(0, timeout_s=0))
  restored = make_coordinator()
  restored.restore(coordinator.state())
  assert isinstance(restored.lease('w'), Wait)
  restored.on_published(1)
  assert isinstance(restored.lease('w'), Lease)


@pytest.mark.parametrize('change', [{'groups': {}}, {'guard': None}, {'max_staleness_seen': 'x'}])
def test_malformed_state_is_refused_by_coordinator(make_coordinator, change):
  with pytest.raises(CheckpointError, match='Use an older'):
    make_coordinator().restore(make_coordinator().state() | change)


def test_prompts_that_do_not_match_the_ledger_are_refused(make_coordinator):
  coordinator = make_coordinator()
  coordinator.on_published(0)
  coordinator.lease('w')
  state = coordinator.state()
  state['groups']['prompts'] = {}
  with pytest.raises(CheckpointError, match='disagree'):
    make_coordinator().restore(state)


def test_quiet_fleet_is_reported(make_coordinator, clock):
  coordinator = make_coordinator(no_worker_warning_s=5.0)
  coordinator.on_published(0)
  clock.now_s += 6
  caller = threading.Thread(
    target=lambda: pytest.raises(FleetError, coordinator.next_batch, 0, timeout_s=1)
  )
  caller.start()
  while not coordinator.metrics()['fleet/no_worker_warnings']:
    time.sleep(0.01)
  clock.now_s += 2
  caller.join(5)
  assert coordinator.metrics()['fleet/no_worker_warnings'] == 1


@pytest.mark.parametrize('error', [None, ValueError('worker died')])
def test_close_wakes_learner_and_workers(make_coordinator, error):
  coordinator = make_coordinator(clock=time.monotonic, groups_per_batch=1)
  coordinator.on_published(0)
  coordinator.lease('w')
  seen = []

  def learner():
    try:
      seen.append(coordinator.next_batch(0, timeout_s=30))
    except ValueError as raised:
      seen.append(raised)

  threads = [
    threading.Thread(target=learner),
    threading.Thread(target=lambda: seen.append(coordinator.lease('w', timeout_s=30))),
  ]
  for thread in threads:
    thread.start()
  coordinator.close(error)
  for thread in threads:
    thread.join(5)
  assert len(seen) == 2 and any(isinstance(answer, Finished) for answer in seen)
  assert (error or []) in seen


def test_blocked_lease_gets_work_when_weights_come(make_coordinator):
  coordinator = make_coordinator(clock=time.monotonic)
  threading.Timer(0.05, coordinator.on_published, [0]).start()
  start_s = time.monotonic()
  assert coordinator.lease('w', timeout_s=10).group_id == 0
  assert time.monotonic() - start_s < 2
  assert isinstance(make_coordinator(clock=time.monotonic).lease('w', timeout_s=0.05), Wait)


def test_leases_carry_the_past_and_it_comes_back(make_group):
  """What was trained is what the next visit of the prompt may know, after a restore too."""

  def make():
    prompt = Prompt(prompt_id='p', messages=(Message(role='user', content='?'),), answer='')
    history = PromptHistory(HistorySettings(samples=1, best=True, success=True), seed=0)
    return Coordinator(
      lambda: prompt,
      group_size=3,
      groups_per_batch=2,
      max_staleness=0,
      lease_timeout_s=10.0,
      history=history,
    )

  coordinator = make()
  coordinator.on_published(0)
  for lease in _lease_all(coordinator):
    assert lease.past.samples == () and lease.past.success_rate == 0.5
    coordinator.deliver(lease, make_group(lease))
  coordinator.mark_trained(coordinator.next_batch(0, timeout_s=0))
  restored = make()
  restored.restore(json.loads(json.dumps(coordinator.state())))
  for each in (coordinator, restored):
    each.on_published(1)
  for one, other in zip(_lease_all(coordinator), _lease_all(restored), strict=True):
    (sample,), (same,) = one.past.samples, other.past.samples
    assert sample.tokens.tolist() == same.tokens.tolist() == [0, 1] and sample.reward == 1.0
    assert one.past.success_rate == other.past.success_rate > 0.8
    assert (
      one.past.success_weights.tolist() == other.past.success_weights.tolist() != [0, 1, 0, 0, 0]
    )
  with pytest.raises(CheckpointError, match='malformed'):
    state = coordinator.state()
    state['groups']['history']['samples'] = {'p': [{'tokens': '?'}]}
    make().restore(state)
