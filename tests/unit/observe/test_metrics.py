"""Metrics reach their files once each, and no sink ever stops training."""

import json
import math
import threading
import time
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from absl import logging
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from rlax_stack.observe import metric_names
from rlax_stack.observe.metric_sinks import JsonlSink, TensorBoardSink
from rlax_stack.observe.metrics import Metrics, open_metrics, to_number


def read_jsonl(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def read_events(folder):
  """All events of a folder in the order that tensorboard reads them, checksums checked."""
  events = []
  for path in sorted(folder.glob('events.out.tfevents.*')):
    data = path.read_bytes()
    while data:
      length = int.from_bytes(data[:8], 'little')
      assert int.from_bytes(data[8:12], 'little') == masked_crc32c(data[:8])
      events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return events


def scalars(events):
  """(tag, step) -> value, as tensorboard shows them: a session start forgets that step and later."""
  result = {}
  for event in events:
    if event.session_log.status == event_pb2.SessionLog.START:
      result = {key: value for key, value in result.items() if key[1] < event.step}
    for value in event.summary.value:
      assert (value.tag, event.step) not in result
      result[value.tag, event.step] = value.simple_value
  return result


def test_values_reach_both_files(tmp_path):
  with open_metrics(
    jsonl_path=tmp_path / 'm.jsonl', tensorboard_dir=tmp_path / 'tb', extra_sinks={}
  ) as metrics:
    metrics.write(1, {'reward/mean': np.float32(0.5), 'count': np.int64(3), 'bad': math.nan})
    metrics.write(2, {'reward/mean': ml_dtypes.bfloat16(0.25), 'bad': -math.inf, 'flag': True})
  records = read_jsonl(tmp_path / 'm.jsonl')
  assert abs(records[0].pop('time_s') - time.time()) < 60
  records[1].pop('time_s')
  assert records == [
    {'step': 1, 'reward/mean': 0.5, 'count': 3, 'bad': None},
    {'step': 2, 'reward/mean': 0.25, 'bad': None, 'flag': 1},
  ]
  shown = scalars(read_events(tmp_path / 'tb'))
  assert (shown['reward/mean', 1], shown['reward/mean', 2], shown['count', 1]) == (0.5, 0.25, 3)
  assert math.isnan(shown['bad', 1])
  assert metrics.dropped == {'jsonl': 0, 'tensorboard': 0}


def test_a_resumed_run_has_every_step_once(tmp_path):
  paths = {'jsonl_path': tmp_path / 'm.jsonl', 'tensorboard_dir': tmp_path / 'tb'}
  with open_metrics(**paths) as metrics:
    for step in range(6):
      metrics.write(step, {'x': step})
  with open(paths['jsonl_path'], 'a') as file:
    file.write('{"step": 3, "x"')  # killed in the middle of a line
  with open_metrics(**paths, restored_step=3) as metrics:
    for step in range(4, 8):
      metrics.write(step, {'x': step * 10})
  expected = {0: 0, 1: 1, 2: 2, 3: 3, 4: 40, 5: 50, 6: 60, 7: 70}
  records = read_jsonl(paths['jsonl_path'])
  assert [(r['step'], r['x']) for r in records] == list(expected.items())
  shown = scalars(read_events(paths['tensorboard_dir']))
  assert shown == {('x', step): value for step, value in expected.items()}


def test_a_run_killed_before_its_first_checkpoint_starts_afresh(tmp_path):
  for life in (1, 2):
    with open_metrics(jsonl_path=tmp_path / 'm.jsonl', tensorboard_dir=tmp_path / 'tb') as metrics:
      metrics.write(0, {'x': life})
  assert [record['x'] for record in read_jsonl(tmp_path / 'm.jsonl')] == [2]
  assert scalars(read_events(tmp_path / 'tb')) == {('x', 0): 2}


def test_flush_makes_what_was_written_readable(tmp_path):
  with open_metrics(jsonl_path=tmp_path / 'm.jsonl') as metrics:
    metrics.write(1, {'x': 1})
    assert metrics.flush()
    assert len(read_jsonl(tmp_path / 'm.jsonl')) == 1


class RaisingSink:
  def write(self, step, time_s, values):
    raise OSError('disk full')

  def flush(self):
    pass

  def close(self):
    pass


def test_a_failing_sink_is_counted_logged_once_and_harms_no_other(tmp_path):
  def cannot_open():
    raise PermissionError('read-only')

  sinks = {'bad': RaisingSink, 'shut': cannot_open, 'good': lambda: JsonlSink(tmp_path / 'm.jsonl')}
  with mock.patch.object(logging, 'warning') as warning:
    with Metrics(sinks) as metrics:
      for step in range(5):
        metrics.write(step, {'x': step})
      assert metrics.flush()
  assert metrics.dropped == {'bad': 5, 'shut': 6, 'good': 0}  # the opening is counted too
  assert warning.call_count == 2
  assert len(read_jsonl(tmp_path / 'm.jsonl')) == 5


def test_a_hanging_sink_stalls_nothing(tmp_path):
  release = threading.Event()

  class HangingSink(RaisingSink):
    def write(self, step, time_s, values):
      release.wait(30)

  metrics = Metrics({'stuck': HangingSink, 'good': lambda: JsonlSink(tmp_path / 'm.jsonl')})
  start_s = time.monotonic()
  with mock.patch.object(logging, 'warning') as warning:
    for step in range(5000):
      metrics.write(step, {'x': step})
    assert metrics.flush(timeout_s=0.05) is False
    metrics.close(timeout_s=0.2)
    metrics.write(5001, {'x': 0})  # after the close: lost, counted
  assert time.monotonic() - start_s < 5
  assert metrics.dropped['stuck'] >= 5000 - 4096
  assert warning.call_count <= 2
  release.set()


def test_a_broken_tensorboard_folder_costs_only_itself(tmp_path):
  (tmp_path / 'tb').write_text('in the way')
  with mock.patch.object(logging, 'warning'):
    with open_metrics(jsonl_path=tmp_path / 'm.jsonl', tensorboard_dir=tmp_path / 'tb') as metrics:
      metrics.write(1, {'x': 1})
  assert metrics.dropped == {'jsonl': 0, 'tensorboard': 2}
  assert len(read_jsonl(tmp_path / 'm.jsonl')) == 1


def test_tensorboard_sink_can_be_closed_after_flush(tmp_path):
  sink = TensorBoardSink(tmp_path)
  sink.write(3, 12.5, {'x': 1.5})
  sink.flush()
  sink.close()
  event = read_events(tmp_path)[-1]
  assert (event.step, event.wall_time, event.summary.value[0].simple_value) == (3, 12.5, 1.5)


def test_to_number():
  assert to_number('x', np.array(2, np.int32)) == 2
  assert isinstance(to_number('x', True), int)
  for bad in ('1', None, [1.0], np.ones(1), 1j):
    with pytest.raises(TypeError, match='must be one number, got x='):
      to_number('x', bad)


def test_time_values_carry_the_prefix():
  assert metric_names.time_values({'train': 0.3}) == {'time/train': 0.3}
