"""Signs of life between the processes of a job, so that one which is gone is named and nobody waits for it for ever.

A collective whose other half is gone may hang on some devices and fail without a name on others. Not for agreement on
batches (multihost.py). Invariant: a process counts as gone only after it gave no sign for the whole deadline.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_FOLDER = 'rlax_stack_alive'
_LEFT = 'left'
_GRACE_S = 5.0  # for the main thread to fail by itself, with a traceback
_ROUNDS = 5  # signs in a deadline


def jax_timeout_s(deadline_s: int) -> int:
  """JAX's own heartbeat timeout, which ends no process before a watch of `deadline_s` has named who is gone.

  JAX beats every half timeout, so it may miss a process half a timeout after it died. The watch takes the deadline,
  three rounds (to see the last sign, to find it old, to find the grace over) and the grace.
  """
  slowest_s = deadline_s * (1 + 3 / _ROUNDS) + _GRACE_S
  return math.ceil(2 * 1.25 * slowest_s)


class PeerWatch:
  """A thread that gives this process's sign and looks for those of the others.

  Args:
    client: the job's store of words (`key_value_set`, `key_value_dir_get`).
    processes: of the job.
    index: of this process.
    deadline_s: without a sign for so long, a process counts as gone.
    end: called with a message where the main thread hangs though somebody is gone; writes it and ends the process.
    clock: a monotonic clock in seconds.
  """

  def __init__(
    self,
    client: Any,
    *,
    processes: int,
    index: int,
    deadline_s: float,
    end: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._client, self._processes, self._index = client, processes, index
    self._deadline_s, self._clock, self._end = deadline_s, clock, end or _end_process
    self._signs = 0
    now = clock()
    self._seen = {other: ('', now) for other in range(processes) if other != index}
    self._gone_since: float | None = None
    self._told = False
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._run, name='peer-watch', daemon=True)

  def start(self) -> None:
    """Watches until `stop`."""
    self._thread.start()

  def stop(self) -> None:
    """Says that this process leaves in order, and watches no more."""
    self._stopped.set()
    self._say(_LEFT)

  def look(self) -> None:
    """One round: gives a sign, looks for the others', and ends the process where it hangs."""
    self._signs += 1
    self._say(str(self._signs))
    try:
      found = dict(self._client.key_value_dir_get(_FOLDER))
    except RuntimeError:  # process 0 is gone, on which JAX itself ends this one
      return
    now = self._clock()
    for key, word in found.items():
      other = int(key.rsplit('/', 1)[1])
      if other in self._seen and (word == _LEFT or word != self._seen[other][0]):
        self._seen[other] = word, now
    if not self.gone():
      self._gone_since = None
      return
    self._gone_since = now if self._gone_since is None else self._gone_since
    if now - self._gone_since >= _GRACE_S and not (self._told or self._stopped.is_set()):
      self._end(self.message())

  def gone(self) -> list[int]:
    """Processes without a sign of life for the deadline."""
    now = self._clock()
    return [i for i, (_, seen_s) in self._seen.items() if now - seen_s > self._deadline_s]

  def message(self) -> str:
    """Who is gone and what to do about it."""
    who = ', '.join(str(i) for i in self.gone())
    return (
      f'process {who} of {self._processes} gave no sign of life for {self._deadline_s:g} s. Look at its log, then '
      'start all processes again from the last checkpoint.'
    )

  def wait_for_gone(self) -> bool:
    """Whether somebody turns out to be gone; waits a little longer than the deadline to know."""
    until = self._clock() + self._deadline_s + _GRACE_S / 2
    while not self.gone() and self._clock() < until:
      time.sleep(0.05)
    if not self.gone():
      return False
    self._told = True  # the caller says it
    return True

  def _run(self) -> None:
    while not self._stopped.wait(self._deadline_s / _ROUNDS):
      self.look()

  def _say(self, word: str) -> None:
    try:
      self._client.key_value_set(f'{_FOLDER}/{self._index}', word, allow_overwrite=True)
    except RuntimeError:  # process 0 is gone
      pass


def _end_process(message: str) -> None:
  sys.stderr.write(f'{message}\n')
  sys.stderr.flush()
  os._exit(1)  # the main thread is inside a collective that never returns
