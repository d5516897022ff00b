"""One child process of the pool as the parent sees it: its pipes, its state and its end.

Not for direct use; `ProcessPool` drives it. Both pipes are non-blocking, so neither a stopped nor a chatty child can
block the parent.
"""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_REPLY_BYTES = 1 << 16
_PACKAGE_ROOT = str(pathlib.Path(__file__).resolve().parents[2])
_KEPT_ENVIRONMENT = (
  'PATH',
  'HOME',
  'LANG',
  'LC_ALL',
  'LD_LIBRARY_PATH',
  'PYTHONPATH',
  'TMPDIR',
  'VIRTUAL_ENV',
)


class Reply(NamedTuple):
  """What the child said of task `index`: a value, or an error."""

  index: int
  value: Any
  error: str | None


class PoolProcess:
  """A started child. `deadline` (monotonic seconds) is None while it is ready and idle."""

  def __init__(self, memory_bytes: int, preload: Sequence[str], start_deadline_s: float):
    self.owner = os.getpid()
    self.is_ready = False
    self.task_index: int | None = None
    self.allowed_s = start_deadline_s
    self.deadline: float | None = time.monotonic() + start_deadline_s
    self.outbox = b''
    self.reply: Reply | None = None
    self.fatal: str | None = None
    self.broken: str | None = None
    self._inbox = b''
    command = [sys.executable, '-P', '-m', 'rlax_stack.rewards.pool_worker']
    command += [f'--memory-bytes={memory_bytes}', f'--preload={",".join(preload)}']
    child_in, self.request_fd = os.pipe()
    self.reply_fd, child_out = os.pipe()
    try:
      self._process = subprocess.Popen(
        command,
        stdin=child_in,
        stdout=child_out,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,  # Ctrl-C is for the parent, which still scores while it saves
      )
    finally:
      os.close(child_in)
      os.close(child_out)
    self._is_killed = False
    os.set_blocking(self.request_fd, False)
    os.set_blocking(self.reply_fd, False)

  @property
  def pid(self) -> int:
    """Process id, which is also its process group."""
    return self._process.pid

  def is_alive(self) -> bool:
    """Whether the child still runs."""
    return self._process.poll() is None

  def submit(self, index: int, kind: str, payload: dict, deadline_s: float) -> None:
    """Queues a task; its deadline starts now."""
    alarm_s = (
      math.ceil(2 * deadline_s) + 5
    )  # for the case that the parent is no longer there to kill it
    request = {'id': index, 'kind': kind, 'payload': payload, 'alarm_s': alarm_s}
    self.outbox = json.dumps(request).encode() + b'\n'
    self.task_index = index
    self.allowed_s = deadline_s
    self.deadline = time.monotonic() + deadline_s

  def move(self, *, readable: bool) -> None:
    """Moves bytes through the pipe that is ready; what came of it is in `reply`, `fatal`, `broken`."""
    try:
      if readable:
        self._receive(os.read(self.reply_fd, MAX_REPLY_BYTES))
      else:
        self.outbox = self.outbox[os.write(self.request_fd, self.outbox) :]
    except BlockingIOError:
      return
    except OSError as error:
      self.broken = f'the reward process is gone ({error.strerror})'

  def kill(self) -> None:
    """SIGKILL to the child's whole process group; waits until it is gone. The second time it does nothing."""
    if self._is_killed:
      return
    self._is_killed = True
    try:
      os.killpg(self._process.pid, signal.SIGKILL)
    except ProcessLookupError:
      pass
    self._process.wait()
    os.close(self.request_fd)
    os.close(self.reply_fd)

  def _receive(self, data: bytes) -> None:
    if not data:
      self.broken = f'the reward process died (exit status {self._process.wait()})'
      return
    self._inbox += data
    if b'\n' not in self._inbox:
      self.broken = (
        'the reward process sent garbage' if len(self._inbox) > MAX_REPLY_BYTES else None
      )
      return
    line, _, self._inbox = self._inbox.partition(b'\n')
    try:
      self._understand(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
      self.broken = 'the reward process sent garbage'

  def _understand(self, message: dict) -> None:
    if self._inbox:
      raise ValueError('more than one reply at a time')
    if not self.is_ready:
      self.fatal = message.get('fatal')
      self.is_ready = self.fatal is None and message['ready'] is True
    elif message['id'] != self.task_index or self.task_index is None:
      raise ValueError('a reply to another task')
    else:
      error = message.get('error')
      self.reply = Reply(self.task_index, None if error else message['value'], error)
      self.task_index = None
    self.deadline = None


def _environment() -> dict[str, str]:
  """A small environment: the child needs none of the parent's secrets, and finds the package where it is."""
  kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
  paths = [_PACKAGE_ROOT, *filter(None, [kept.get('PYTHONPATH')])]
  return {**kept, 'PYTHONPATH': os.pathsep.join(paths), 'PYTHONHASHSEED': '0'}
