"""The worker's side of the protocol: one JSON line in, one JSON line out, nothing else."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from rlax_stack.rewards import pool_tasks, pool_worker

needs_reasoning_gym = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None, reason='reasoning-gym is not installed'
)


_ROOT = pathlib.Path(pool_worker.__file__).resolve().parents[2]


def talk(requests, *, preload='', path=''):
  command = [sys.executable, '-P', '-m', pool_worker.__name__, f'--memory-bytes={1 << 31}']
  done = subprocess.run(
    [*command, f'--preload={preload}'],
    input=''.join(json.dumps(request) + '\n' for request in requests),
    capture_output=True,
    text=True,
    timeout=60,
    env={'PATH': os.environ['PATH'], 'PYTHONPATH': f'{_ROOT}{os.pathsep}{path}'},
  )
  assert done.stderr == ''
  return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def request(id_, kind, alarm_s=30, **payload):
  return {'id': id_, 'kind': kind, 'alarm_s': alarm_s, 'payload': payload}


def test_replies_follow_requests_until_the_input_ends():
  status, replies = talk(
    [
      request(4, 'regex', pattern='a', full=False, text='bab'),
      request(5, 'regex', pattern='a'),
      request(6, 'probe', num_bytes=10),
    ]
  )
  assert status == 0
  assert replies == [
    {'ready': True},
    {'id': 4, 'value': 1.0},
    {'id': 5, 'error': "KeyError: 'full'"},
    {'id': 6, 'value': 1.0},
  ]


def test_what_a_grader_prints_is_thrown_away(tmp_path):
  (tmp_path / 'math_verify.py').write_text(
    'import os\n'
    'def parse(text, parsing_timeout):\n'
    '  print(\'{"id": 1, "value": 9}\', flush=True)\n'
    '  os.write(2, b"noise")\n'
    '  return [float(text.strip("$"))]\n'
    'def verify(gold, predicted, **options):\n'
    '  return gold == predicted\n'
  )
  requests = [request(1, 'math', gold='2', text='2.0'), request(2, 'math', gold='2', text='3')]
  _, replies = talk(requests, preload='math', path=tmp_path)
  assert replies == [{'ready': True}, {'id': 1, 'value': 1.0}, {'id': 2, 'value': 0.0}]


def test_the_alarm_ends_a_worker_that_nobody_kills():
  status, replies = talk([request(1, 'probe', alarm_s=1, seconds=30)])
  assert status == -14 and replies == [{'ready': True}]


def test_graders_write_no_files(tmp_path):
  (tmp_path / 'math_verify.py').write_text(
    'def parse(text, parsing_timeout):\n'
    '  return [float(text.strip("$"))]\n'
    'def verify(gold, predicted, **options):\n'
    f'  open({str(tmp_path / "out")!r}, "w").write("x" * 9999)\n'
  )
  _, replies = talk([request(1, 'math', gold='2', text='2')], path=tmp_path)
  assert 'File too large' in replies[1]['error']


def test_preload_says_what_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, 'math_verify', None)
  with pytest.raises(ImportError, match='pip install math-verify reasoning-gym'):
    pool_tasks.preload('math')
  pool_tasks.preload('nothing')


@needs_reasoning_gym
def test_preload_loads_one_task():
  pool_tasks.preload('reasoning_gym:gcd')
