"""Rollout records: values, the cap across groups, hostile text, and disks that fail."""

import json
import math
from unittest import mock

import numpy as np
from absl import logging

from rlax_stack.observe.rollouts_writer import RolloutsWriter, read_rollouts, rollout_record
from rlax_stack.types import FinishReason, Group, Message, Prompt, Reward, Source, Trajectory

HOSTILE = '</script><script>alert(1)</script>\x1b]0;owned\x07\u2028\ud800"\'\\'


def trajectory(group_id, index, *, text='7', reward=None):
  return Trajectory(
    group_id=group_id,
    sample_index=index,
    prompt_id=f'p{group_id}',
    tokens=np.arange(5, dtype=np.int32),
    source_t=np.array([Source.PROMPT] * 2 + [Source.POLICY] * 3, np.int8),
    mask_t=np.array([False] * 2 + [True] * 3),
    behaviour_log_probs_t=np.zeros(5, np.float32),
    raw_log_probs_t=np.zeros(5, np.float32),
    version_t=np.array([-1, -1, 4, 4, 5], np.int32),
    finish_reason=FinishReason.STOP,
    text=text,
    reward=reward,
  )


def group(group_id, size, **kwargs):
  messages = (Message(role='system', content='Be brief.'), Message(role='user', content='3 + 4?'))
  return Group(
    group_id=group_id,
    prompt=Prompt(prompt_id=f'p{group_id}', messages=messages, answer='7'),
    prompt_tokens=np.arange(2, dtype=np.int32),
    trajectories=tuple(trajectory(group_id, index, **kwargs) for index in range(size)),
  )


def test_a_record_holds_what_a_person_asks_for():
  one = group(3, 1, reward=Reward(value=np.float32(1), parts={'exact': 1.0, 'format': math.nan}))
  assert rollout_record(9, one, one.trajectories[0]) == {
    'step': 9,
    'trajectory_id': '3/0',
    'prompt_id': 'p3',
    'prompt': 'system: Be brief.\nuser: 3 + 4?',
    'completion': '7',
    'truncated_chars': 0,
    'answer': '7',
    'reward': 1.0,
    'reward_parts': {'exact': 1.0, 'format': None},
    'reward_failure': None,
    'finish_reason': 'stop',
    'num_tokens': 3,
    'oldest_version': 4,
    'newest_version': 5,
  }


def test_a_failed_reward_is_no_zero():
  one = group(0, 1, reward=Reward(value=None, failure='timed out'))
  record = rollout_record(1, one, one.trajectories[0])
  assert (record['reward'], record['reward_failure']) == (None, 'timed out')
  unscored = group(0, 1)
  assert rollout_record(1, unscored, unscored.trajectories[0])['reward'] is None


def test_the_cap_takes_one_of_every_group_first(tmp_path):
  writer = RolloutsWriter(tmp_path, max_per_step=4)
  assert writer.write(1, [group(0, 3), group(1, 1), group(2, 2)]) == 4
  records = read_rollouts(tmp_path, split='train', last=True)
  assert [record['trajectory_id'] for record in records] == ['0/0', '1/0', '2/0', '0/1']


def test_hostile_text_stays_ascii_json_and_long_text_is_cut(tmp_path):
  RolloutsWriter(tmp_path).write(1, [group(0, 1, text=HOSTILE)])
  raw = (tmp_path / 'train-000001.jsonl').read_bytes()
  assert raw.isascii() and b'\x1b' not in raw and raw.count(b'\n') == 1
  assert json.loads(raw)['completion'] == HOSTILE
  RolloutsWriter(tmp_path, max_text_chars=40).write(1, [group(0, 1, text='x' * 100)])
  record = read_rollouts(tmp_path, split='train', last=True)[0]
  assert (record['completion'], record['truncated_chars']) == ('x' * 40, 60)


def test_resume_removes_later_files_and_first_and_last_are_found(tmp_path):
  writer = RolloutsWriter(tmp_path)
  for step in (0, 5, 10):
    writer.write(step, [group(step, 1)], split='held_out')
  (tmp_path / 'notes-mine.jsonl').write_text('')
  RolloutsWriter(tmp_path, restored_step=5)
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ['held_out-000000.jsonl', 'held_out-000005.jsonl', 'notes-mine.jsonl']
  steps = [
    read_rollouts(tmp_path, split='held_out', last=last)[0]['step'] for last in (False, True)
  ]
  assert steps == [0, 5]
  assert read_rollouts(tmp_path, split='train', last=True) == []


def test_a_failing_disk_is_counted_and_logged_once(tmp_path):
  with mock.patch.object(logging, 'warning') as warning:
    writer = RolloutsWriter(tmp_path / 'not_there')
    assert [writer.write(step, [group(0, 1)]) for step in range(3)] == [0, 0, 0]
  assert writer.failed == 3
  assert warning.call_count == 1
