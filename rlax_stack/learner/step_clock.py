"""Where the time of one batch goes in the learner, seen from the host without holding the device up.

Not a profiler. Invariant: parts are told in the order in which the device does them, so that waiting
for each in turn, after all were dispatched, finds when it ended.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from rlax_stack.learner import multihost


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


class StepMetrics:
  """Metrics of one batch, still on the device; `result` waits for them."""

  def __init__(self, scalars: Mapping[str, Any], host: Mapping[str, float], clock: StepClock):
    self._scalars, self._host, self._clock = scalars, host, clock

  def is_ready(self) -> bool:
    """Whether the devices are done with the step."""
    return all(value.is_ready() for value in self._scalars.values())

  def seconds(self) -> dict[str, float]:
    """Where the time went; blocks until the step is done.

    data: packing on the host. log_probs: anchor, proximal policy and critic scored beside the update.
    train: forward, backward and optimizer, which are one program, and the copy of the batch to the
    devices.
    """
    return self._clock.seconds()

  @multihost.naming_who_is_gone()
  def result(self) -> dict[str, float]:
    """All metrics as Python floats; blocks until the step is done."""
    self._clock.seconds()
    fetched = jax.device_get(dict(self._scalars))
    return dict(self._host) | {name: float(value) for name, value in fetched.items()}
