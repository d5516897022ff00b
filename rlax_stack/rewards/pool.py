"""A pool of killable processes for graders that may hang, crash or eat memory.

Each process speaks JSON lines over pipes (no pickle). A task that passes its deadline costs its process: it is
killed with SIGKILL and replaced at once. Invariant: `run` answers every task, with a value or with the reason why
there is none, and after it the pool has as many processes as before. Nothing is started until the first task.
"""

import collections
import os
import selectors
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlax_stack.errors import RewardError
from rlax_stack.rewards.pool_process import PoolProcess

START_DEADLINE_S = 120.0  # a cold import of sympy on a busy machine
MAX_FAILED_STARTS = 3


class PoolTask(NamedTuple):
  """`kind` is a key of `pool_tasks.TASKS`; `payload` holds JSON values only."""

  kind: str
  payload: Mapping[str, Any]


class PoolResult(NamedTuple):
  """Exactly one of the two is None: the task's value (a JSON value), or why there is none."""

  value: Any
  failure: str | None


class ProcessPool:
  """Runs tasks in `num_processes` processes of at most `memory_bytes` of address space each.

  `preload` names what every process imports before it counts as ready (see `pool_tasks.preload`). Use it as a
  context manager, or call `close`. Threads may share it; their `run` calls take turns.
  """

  def __init__(
    self, *, num_processes: int = 2, memory_bytes: int = 2 << 30, preload: Sequence[str] = ()
  ):
    if num_processes < 1:
      raise ValueError(
        f'num_processes must be at least 1, got {num_processes}. Set config.reward.num_processes.'
      )
    self._num_processes = num_processes
    self._memory_bytes = memory_bytes
    self._preload = tuple(preload)
    self._lock = threading.Lock()
    self._processes: list[PoolProcess] = []
    self._failed_starts = 0
    self._closed = False
    weakref.finalize(self, _kill_all, self._processes)

  def __enter__(self) -> 'ProcessPool':
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  @property
  def num_alive(self) -> int:
    """Processes that are running now: 0 before the first task and after `close`."""
    return sum(process.is_alive() for process in self._processes)

  def start(self) -> None:
    """Starts the processes without waiting until they are ready; `run` does so by itself."""
    with self._lock:
      self._fill()

  def close(self) -> None:
    """Kills all processes. Calling it again does nothing; `run` afterwards raises RewardError."""
    with self._lock:
      self._closed = True
      _kill_all(self._processes)

  def run(self, tasks: Sequence[PoolTask], *, deadline_s: float) -> list[PoolResult]:
    """Runs all tasks and returns their results in order.

    Args:
      tasks: any number; queued tasks wait for a free process.
      deadline_s: seconds per task, on the monotonic clock, from handing it to a ready process.

    Raises RewardError if the pool is closed or its processes do not start (a package is missing).
    """
    results: dict[int, PoolResult] = {}
    waiting = collections.deque(range(len(tasks)))
    with self._lock:
      try:
        while len(results) < len(tasks):
          self._fill()
          self._hand_out(tasks, waiting, deadline_s)
          self._wait()
          for process in list(self._processes):
            self._settle(process, results)
      finally:  # after an exception, Ctrl-C too, a late reply must not be taken for the next run's
        for process in [busy for busy in self._processes if busy.task_index is not None]:
          self._drop(process)
    return [results[index] for index in range(len(tasks))]

  def _fill(self) -> None:
    if self._closed:
      raise RewardError('the reward pool is closed; build a new chain to score again')
    for process in list(self._processes):
      if process.is_ready and not process.is_alive():
        self._drop(process)
    while len(self._processes) < self._num_processes:
      self._processes.append(PoolProcess(self._memory_bytes, self._preload, START_DEADLINE_S))

  def _drop(self, process: PoolProcess) -> None:
    process.kill()
    self._processes.remove(process)

  def _hand_out(
    self, tasks: Sequence[PoolTask], waiting: collections.deque, deadline_s: float
  ) -> None:
    for process in self._processes:
      if waiting and process.is_ready and process.task_index is None:
        index = waiting.popleft()
        process.submit(index, tasks[index].kind, dict(tasks[index].payload), deadline_s)

  def _wait(self) -> None:
    """Blocks until a pipe can move or the nearest deadline passes, and moves the bytes."""
    with selectors.DefaultSelector() as selector:
      for process in self._processes:
        if process.deadline is not None:
          selector.register(process.reply_fd, selectors.EVENT_READ, process)
          if process.outbox:
            selector.register(process.request_fd, selectors.EVENT_WRITE, process)
      deadlines = [process.deadline for process in self._processes if process.deadline is not None]
      timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else 0.0
      for key, events in selector.select(timeout_s):
        key.data.move(readable=bool(events & selectors.EVENT_READ))

  def _settle(self, process: PoolProcess, results: dict[int, PoolResult]) -> None:
    """Takes the reply of a process, or replaces a process that died, lied or is late."""
    if process.fatal is not None:
      raise RewardError(f'a reward process cannot start: {process.fatal}')
    if process.reply is not None:
      results[process.reply.index] = PoolResult(process.reply.value, process.reply.error)
      process.reply = None
    reason = process.broken
    if reason is None and process.deadline is not None and time.monotonic() >= process.deadline:
      reason = f'deadline of {process.allowed_s:g} s passed'
    if reason is None:
      self._failed_starts = 0 if process.is_ready else self._failed_starts
      return
    if process.task_index is not None:
      results[process.task_index] = PoolResult(None, reason)
    elif not process.is_ready:
      self._count_failed_start(reason)
    self._drop(process)
    self._fill()  # at once, so that the import runs while other tasks do

  def _count_failed_start(self, reason: str) -> None:
    self._failed_starts += 1
    if self._failed_starts >= MAX_FAILED_STARTS:
      raise RewardError(
        f'reward processes do not start, {self._failed_starts} times in a row: {reason}. Try it by hand: '
        f'python -m rlax_stack.rewards.pool_worker --memory-bytes={self._memory_bytes} '
        f'--preload={",".join(self._preload)}'
      )


def _kill_all(processes: list[PoolProcess]) -> None:
  owner = os.getpid()
  for process in processes:
    if process.owner == owner:  # a forked copy of the pool owns nothing
      process.kill()
  processes.clear()
