"""Where the time of one batch goes in the learner, seen from the host without holding the device up.

Not a profiler. Invariant: parts are told in the order in which the device does them, so that waiting
for each in turn, after all were dispatched, finds when it ended.
"""

import time
from collections.abc import Callable
from typing import Any


class StepClock:
  """Times the parts of one batch; starts when it is made.

  Args:
    clock: a monotonic clock in seconds.
  """

  def __init__(self, *, clock: Callable[[], float] = time.monotonic):
    self._clock, self._last_s = clock, clock()
    self._seconds: dict[str, float] = {}
    self._dispatched: list[tuple[str, Any, float | None]] = []

  def done(self, name: str) -> None:
    """What the host did since the last call belongs to `name`."""
    self._add(name, self._clock())

  def dispatched(self, name: str, result: Any) -> None:
    """`result`, a jax array that is not given away, comes of the work `name` that was just dispatched."""
    # A device may be done already, as the CPU with small programs: seen later, it would look slow.
    self._dispatched.append((name, result, self._clock() if result.is_ready() else None))

  def seconds(self) -> dict[str, float]:
    """Seconds of every part by name; waits for the device."""
    for name, result, end_s in self._dispatched:
      if end_s is None:
        result.block_until_ready()
        end_s = self._clock()
      self._add(name, end_s)
    self._dispatched = []
    return dict(self._seconds)

  def _add(self, name: str, end_s: float) -> None:
    self._seconds[name] = self._seconds.get(name, 0.0) + max(0.0, end_s - self._last_s)
    self._last_s = max(self._last_s, end_s)
