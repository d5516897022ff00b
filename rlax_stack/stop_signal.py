"""Ctrl-C and SIGTERM as a request to stop at the next step boundary; a second Ctrl-C stops at once."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignal:
  """A context manager for the main thread. `received` is the signal, or None.

  Args:
    on_stop: called in the main thread with the signal's name when the first one comes; it must
      only set flags and wake waiters.
  """

  def __init__(self, on_stop: Callable[[str], None]):
    self.received: signal.Signals | None = None
    self._on_stop = on_stop
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> 'StopSignal':
    for number in (signal.SIGINT, signal.SIGTERM):
      self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *unused: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  @property
  def exit_code(self) -> int:
    """128 + the signal's number, as a shell reports it; 0 when none came."""
    return 128 + self.received if self.received is not None else 0

  def _handle(self, number: int, frame: FrameType | None) -> None:
    if self.received is not None:
      raise KeyboardInterrupt(f'stopped at once by a second {signal.Signals(number).name}')
    self.received = signal.Signals(number)
    self._on_stop(self.received.name)
