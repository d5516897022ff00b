"""Where the wall time of a step goes: generate, score, train, publish, checkpoint.

For the training loop's own thread. Not a profiler. Invariant: the named parts and `other` of one
lap sum to the lap, because a nested measurement is taken out of the one around it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

OTHER = 'other'


class Lap(NamedTuple):
  """One step's time. `seconds` holds each part by name (and `other`), `total_s` the whole lap."""

  seconds: dict[str, float]
  total_s: float

  @property
  def fractions(self) -> dict[str, float]:
    """Each part divided by the lap; zeros for a lap of no length."""
    total_s = self.total_s
    return {name: (part / total_s if total_s > 0 else 0.0) for name, part in self.seconds.items()}


class TimeSplit:
  """Accumulates named parts between two `lap()` calls.

  Args:
    clock: a monotonic clock in seconds.
  """

  def __init__(self, *, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._lock = threading.Lock()
    self._local = threading.local()
    self._seconds: dict[str, float] = {}
    self._lap_start_s = clock()

  @contextlib.contextmanager
  def measure(self, name: str) -> Iterator[None]:
    """Adds the time inside the block to `name`, an exception included."""
    stack = self._stack()
    start_s = self._clock()
    stack.append(0.0)
    try:
      yield
    finally:
      elapsed_s = self._clock() - start_s
      nested_s = stack.pop()
      if stack:
        stack[-1] += elapsed_s
      self.add(name, elapsed_s - nested_s)

  def add(self, name: str, seconds: float) -> None:
    """Adds time that was measured elsewhere."""
    with self._lock:
      self._seconds[name] = self._seconds.get(name, 0.0) + seconds

  def move(self, source: str, name: str, seconds: float) -> None:
    """Gives `name` so much of the time of `source`, and no more than that has in this lap."""
    with self._lock:
      moved_s = max(0.0, min(seconds, self._seconds.get(source, 0.0)))
    self.add(source, -moved_s)
    self.add(name, moved_s)

  def lap(self) -> Lap:
    """Ends the lap: returns its parts and starts the next one from zero."""
    with self._lock:
      now_s = self._clock()
      total_s = now_s - self._lap_start_s
      seconds = self._seconds
      self._lap_start_s, self._seconds = now_s, {}
    # Parts measured in another thread overlap the lap, so the rest is floored at zero.
    return Lap(seconds | {OTHER: max(0.0, total_s - sum(seconds.values()))}, total_s)

  def _stack(self) -> list[float]:
    if not hasattr(self._local, 'stack'):
      self._local.stack = []
    return self._local.stack
