"""The small parts of the coordinator: prompts as JSON, deliveries, the reward guard, the watch over workers."""

import json

import numpy as np
import pytest

from rlax_stack.errors import CheckpointError, FleetError, RewardError
from rlax_stack.fleet import delivery
from rlax_stack.fleet.group_table import GroupTable
from rlax_stack.fleet.lease import prompt_from_json, prompt_to_json
from rlax_stack.fleet.reward_guard import RewardGuard
from rlax_stack.fleet.worker_watch import WorkerWatch
from rlax_stack.types import FinishReason, Message, Prompt


@pytest.fixture
def lease():
  table = GroupTable(
    group_size=3, min_group_size=2, max_staleness=0, max_attempts=2, lease_timeout_s=1.0
  )
  prompt = Prompt(prompt_id='a', messages=(Message(role='user', content='q'),), answer='1')
  return table.grant(table.issue(prompt), 'w', version=0, now_s=0.0)


def test_prompt_survives_json():
  prompt = Prompt(
    prompt_id='train/7',
    messages=(
      Message(role='system', content='Be brief.'),
      Message(role='user', content='2 × 3 = ?\n'),
    ),
    answer='6',
    metadata={'source': 'x', 'entry': {'terms': [2, 3], 'hard': False, 'note': None}},
  )
  assert prompt_from_json(json.loads(json.dumps(prompt_to_json(prompt)))) == prompt


@pytest.mark.parametrize(
  'value', [{}, {'prompt_id': 'a', 'messages': [['user']], 'answer': '', 'metadata': {}}]
)
def test_malformed_prompt_is_refused(value):
  with pytest.raises(CheckpointError, match='malformed'):
    prompt_from_json(value)


def test_delivery_makes_a_group_in_order_of_index(lease, make_group):
  trajectories = make_group(lease)[::-1]
  delivery.check_delivery(lease.group_id, 3, trajectories)
  group = delivery.make_group(lease.group_id, lease.prompt, trajectories, {'': 3})
  assert [t.sample_index for t in group.trajectories] == [0, 1, 2]
  np.testing.assert_array_equal(group.prompt_tokens, [7, 8])
  assert group.prompt_tokens.dtype == np.int32
  with pytest.raises(FleetError, match='needs samples 0..3'):
    delivery.check_delivery(lease.group_id, 4, trajectories)


def test_reward_failure_and_usable(lease, make_trajectory):
  good = make_trajectory(lease, 0, value=0.0)
  assert delivery.reward_failure(good) is None and delivery.is_usable(good)
  assert delivery.reward_failure(make_trajectory(lease, 0, failure='timed out')) == 'timed out'
  assert delivery.reward_failure(make_trajectory(lease, 0, value=float('inf'))) == 'reward is inf'
  assert not delivery.is_usable(make_trajectory(lease, 0, value=float('nan')))
  assert not delivery.is_usable(make_trajectory(lease, 0, reason=FinishReason.ABORT))
  assert not delivery.is_usable(make_trajectory(lease, 0, versions=[]))
  np.testing.assert_array_equal(
    delivery.prompt_tokens_of(make_trajectory(lease, 0, versions=[])), [7, 8]
  )


def test_guard_stops_above_the_fraction_once_the_window_is_full():
  guard = RewardGuard(max_failure_fraction=0.25, window=8, max_failed_groups_in_row=9)
  guard.add(4, ['timed out'] * 3)
  with pytest.raises(RewardError, match=r'3 of the last 8 verdicts failed \(limit 25.00%\)'):
    guard.add(4, [])
  assert guard.failed_total == 3


def test_guard_forgets_what_left_the_window():
  guard = RewardGuard(max_failure_fraction=0.25, window=8)
  guard.add(2, ['x'] * 2)
  for _ in range(20):
    guard.add(4, [])
  guard.add(4, ['x', 'x'])  # 2 of 8 is the limit
  restored = RewardGuard(max_failure_fraction=0.25, window=8)
  restored.restore(json.loads(json.dumps(guard.state())))
  for each in (guard, restored):
    assert each.failed_total == 4
    with pytest.raises(RewardError, match='3 of the last 8'):
      each.add(4, ['y'])


def test_guard_stops_when_everything_fails():
  guard = RewardGuard(max_failure_fraction=1.0, window=1000, max_failed_groups_in_row=3)
  for _ in range(2):
    guard.add(4, ['no module named sympy'] * 4)
  guard.add(4, ['x'] * 3)  # one verdict came: the count starts again
  for _ in range(2):
    guard.add(4, ['x'] * 4)
  with pytest.raises(RewardError, match='in 3 groups in a row; the last: no module'):
    guard.add(4, ['no module named sympy'] * 4)


def test_watch_warns_once_a_period_and_forgets(clock):
  watch = WorkerWatch(warning_s=5.0, forget_s=20.0, clock=clock)
  watch.heard('a')
  clock.now_s += 4
  assert not watch.warn_if_quiet('nothing ready')
  watch.heard('b')
  clock.now_s += 5
  assert watch.warn_if_quiet('nothing ready') and not watch.warn_if_quiet('nothing ready')
  clock.now_s += 5
  assert watch.warn_if_quiet('nothing ready')
  assert watch.num_warnings == 2 and len(watch) == 2
  clock.now_s += 8
  watch.heard('b')
  assert len(watch) == 1
