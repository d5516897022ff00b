"""The largest value of a knob that still fits, found by doubling it and compiling."""

from collections.abc import Callable
from typing import NamedTuple


class LargestFit(NamedTuple):
  """`value` fits and takes `used` bytes of a device; `next_used`: what the next one takes, None if not tried."""

  value: int
  used: float
  next_used: float | None


def largest_fit(
  used_by: Callable[[int], float | None], *, start: int, used: float, capacity: float, most: int
) -> LargestFit:
  """Doubles from `start` until something does not fit.

  Args:
    used_by: bytes that a device needs with a value; None where the compiler gives up.
    start: a value that fits.
    used: bytes with it.
    capacity: bytes of a device.
    most: the largest value that makes a difference; the last one tried is below twice that.
  """
  value = start
  while value < most:
    found = used_by(2 * value)
    if found is None or found > capacity:
      return LargestFit(value, used, float('inf') if found is None else found)
    value, used = 2 * value, found
  return LargestFit(value, used, None)
