"""The pool kills what does not end, survives what dies, and never shrinks."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlax_stack.errors import RewardError
from rlax_stack.rewards import pool_process
from rlax_stack.rewards.pool import PoolResult, PoolTask, ProcessPool

HANG = PoolTask('regex', {'pattern': '(a|a)*b', 'full': True, 'text': 'a' * 60})
QUICK = PoolTask('regex', {'pattern': 'a+', 'full': True, 'text': 'aaa'})


@pytest.fixture(scope='module')
def pool():
  with ProcessPool(num_processes=2, memory_bytes=1 << 30) as shared:
    yield shared


def make_all_ready(pool):
  pool.start()
  while not all(process.is_ready for process in pool._processes):
    pool.run([PoolTask('probe', {'seconds': 0.05})] * 2, deadline_s=30)


def test_results_come_in_order(pool):
  tasks = [QUICK._replace(payload={**QUICK.payload, 'text': text}) for text in 'aba' * 20]
  values = [result.value for result in pool.run(tasks, deadline_s=30)]
  assert values == [1.0, 0.0, 1.0] * 20
  assert pool.run([], deadline_s=1) == []


def test_a_hanging_task_is_killed_at_its_deadline_and_the_pool_is_full_again(pool):
  make_all_ready(pool)
  start = time.monotonic()
  results = pool.run([HANG, QUICK, QUICK, QUICK], deadline_s=1.5)
  assert 1.5 <= time.monotonic() - start < 6
  assert results[0] == PoolResult(None, 'deadline of 1.5 s passed')
  assert [result.value for result in results[1:]] == [1.0] * 3
  assert pool.num_alive == 2
  assert [result.value for result in pool.run([QUICK] * 4, deadline_s=30)] == [1.0] * 4


def test_a_sleeping_task_is_killed_too(pool):
  results = pool.run(
    [PoolTask('probe', {'seconds': 60}), PoolTask('probe', {'seconds': 0})], deadline_s=1
  )
  assert results == [PoolResult(None, 'deadline of 1 s passed'), PoolResult(1.0, None)]


def test_an_exception_is_a_failure_with_its_message(pool):
  (result,) = pool.run([PoolTask('regex', {'pattern': '('})], deadline_s=30)
  assert (
    result.value is None and result.failure.startswith('PatternError') or 'error' in result.failure
  )
  (result,) = pool.run([PoolTask('no such kind', {})], deadline_s=30)
  assert result == PoolResult(None, "KeyError: 'no such kind'")


def test_memory_is_capped():
  with ProcessPool(num_processes=1, memory_bytes=1 << 30) as small:
    tasks = [PoolTask('probe', {'num_bytes': size}) for size in (10 << 30, 1 << 20)]
    assert small.run(tasks, deadline_s=30) == [
      PoolResult(None, 'MemoryError: '),
      PoolResult(1.0, None),
    ]


def test_a_process_that_dies_by_itself_fails_its_task_only(pool):
  make_all_ready(pool)
  victim = pool._processes[0].pid
  killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
  killer.start()
  results = pool.run([PoolTask('probe', {'seconds': 1.5})] * 2, deadline_s=30)
  killer.join()
  assert sorted(result.failure or '' for result in results) == [
    '',
    'the reward process died (exit status -9)',
  ]
  assert pool.num_alive == 2


def test_a_process_that_died_while_idle_costs_no_task(pool):
  make_all_ready(pool)
  for process in pool._processes:
    os.kill(process.pid, signal.SIGKILL)
    process._process.wait()
  assert pool.run([QUICK] * 4, deadline_s=30) == [PoolResult(1.0, None)] * 4
  assert pool.num_alive == 2


def test_a_stopped_process_cannot_block_the_caller(pool):
  make_all_ready(pool)
  for process in pool._processes:
    os.kill(process.pid, signal.SIGSTOP)
  large = PoolTask('regex', {**QUICK.payload, 'text': 'a' * 500_000})
  results = pool.run([large] * 2, deadline_s=1)
  assert results == [PoolResult(None, 'deadline of 1 s passed')] * 2
  assert pool.run([large], deadline_s=30) == [PoolResult(1.0, None)]


@pytest.mark.parametrize(
  ('line', 'expected'),
  [
    (b'hello\n', 'the reward process sent garbage'),
    (b'[1]\n', 'the reward process sent garbage'),
    (b'{"id": 8, "value": 1.0}\n', 'the reward process sent garbage'),
    (b'{"id": 7}\n', 'the reward process sent garbage'),
    (b'{"id": 7, "value": 1.0}\n{"id": 7, "value": 0.0}\n', 'the reward process sent garbage'),
    (b'[' * 60_000 + b'\n', 'the reward process sent garbage'),
    (b'x' * 70_000, 'the reward process sent garbage'),
    (b'{"id": 7, "value": 1.0}\n', None),
  ],
)
def test_garbage_is_noticed(line, expected):
  process = pool_process.PoolProcess(1 << 30, (), 30.0)
  try:
    process.is_ready = True
    process.submit(7, 'regex', {}, 30.0)
    process._receive(line)
    assert process.broken == expected
    assert (process.reply == pool_process.Reply(7, 1.0, None)) is (expected is None)
    assert process.is_alive()
  finally:
    process.kill()
  assert not process.is_alive()
  process.kill()  # twice is harmless


def test_an_interrupted_run_leaves_no_late_reply_behind(pool, monkeypatch):
  make_all_ready(pool)
  calls = []

  def interrupt(self):
    calls.append(1)
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(ProcessPool, '_wait', interrupt)
    with pytest.raises(KeyboardInterrupt):
      pool.run([PoolTask('probe', {'seconds': 0.1})], deadline_s=30)
  assert calls == [1]
  failing = QUICK._replace(payload={**QUICK.payload, 'text': 'b'})
  assert pool.run([failing] * 2, deadline_s=30) == [PoolResult(0.0, None)] * 2


def test_threads_share_a_pool(pool):
  out = {}
  threads = [
    threading.Thread(target=lambda i=i: out.update({i: pool.run([QUICK] * 5, deadline_s=30)}))
    for i in range(3)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert out == {i: [PoolResult(1.0, None)] * 5 for i in range(3)}


def test_a_missing_package_is_an_error_at_start(monkeypatch, tmp_path):
  missing = "raise ModuleNotFoundError('No module named math_verify')"
  (tmp_path / 'math_verify.py').write_text(missing)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  with ProcessPool(num_processes=1, preload=('math',)) as pool:
    with pytest.raises(RewardError, match='cannot start: No module.*pip install math-verify'):
      pool.run([QUICK], deadline_s=30)


def test_processes_that_never_start_are_an_error(monkeypatch):
  monkeypatch.setattr(pool_process.sys, 'executable', '/bin/false')
  with ProcessPool(num_processes=1) as pool:
    with pytest.raises(RewardError, match='do not start, 3 times in a row.*exit status 1'):
      pool.run([QUICK], deadline_s=30)


def test_start_is_lazy_and_close_is_final():
  pool = ProcessPool(num_processes=1)
  assert pool.num_alive == 0
  pool.start()
  assert pool.num_alive == 1
  pool.close()
  pool.close()
  assert pool.num_alive == 0
  with pytest.raises(RewardError, match='closed'):
    pool.run([QUICK], deadline_s=1)
  with pytest.raises(ValueError, match='num_processes must be at least 1, got 0'):
    ProcessPool(num_processes=0)


_ORPHANS = """
import sys
from rlax_stack.rewards.pool import PoolTask, ProcessPool
pool = ProcessPool(num_processes=1)
pool.run([PoolTask('probe', {'seconds': 0})], deadline_s=30)
print(pool._processes[0].pid, flush=True)
sys.stdin.read()
"""


def test_processes_end_with_a_killed_parent():
  parent = subprocess.Popen(
    [sys.executable, '-c', _ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
  )
  child = int(parent.stdout.readline())
  parent.kill()
  parent.communicate()
  give_up = time.monotonic() + 10
  while _runs(child) and time.monotonic() < give_up:
    time.sleep(0.05)
  assert not _runs(child)


def _runs(pid):
  try:
    with open(f'/proc/{pid}/stat') as stat:
      return stat.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def test_pool_processes_import_nothing_large():
  code = (
    'import sys, rlax_stack.rewards.chain, rlax_stack.rewards.pool_worker\n'
    "large = {'jax', 'jaxlib', 'flax', 'grain', 'sympy', 'math_verify', 'reasoning_gym', 'torch'}\n"
    'print(sorted(large & set(sys.modules)))'
  )
  found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert found.stdout.strip() == '[]'
