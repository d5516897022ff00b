"""Who was heard of lately, and a warning when nobody was. Not for: leases, which have their own deadlines."""

import collections
from collections.abc import Callable

from absl import logging


class WorkerWatch:
  """Not thread-safe: the coordinator locks. Times are seconds of `clock`."""

  def __init__(self, *, warning_s: float, forget_s: float, clock: Callable[[], float]):
    """Warns after `warning_s` without a word, again each time that it passes; forgets a worker after `forget_s`."""
    self._warning_s, self._forget_s, self._clock = warning_s, forget_s, clock
    self._heard_at_s: collections.OrderedDict[str, float] = (
      collections.OrderedDict()
    )  # longest silent first
    self._last_s = self._warned_s = clock()
    self.num_warnings = 0

  def __len__(self) -> int:
    """Workers heard of within `forget_s` of the last word of anybody."""
    return len(self._heard_at_s)

  def heard(self, worker_id: str) -> None:
    """Notes a sign of life."""
    now_s = self._last_s = self._clock()
    self._heard_at_s[worker_id] = now_s
    self._heard_at_s.move_to_end(worker_id)
    while next(iter(self._heard_at_s.values())) < now_s - self._forget_s:
      self._heard_at_s.popitem(last=False)

  def warn_if_quiet(self, situation: str) -> bool:
    """Logs `situation` where nobody was heard of, once per `warning_s`; True where it did."""
    now_s = self._clock()
    if now_s - max(self._last_s, self._warned_s) < self._warning_s:
      return False
    self._warned_s = now_s
    self.num_warnings += 1
    logging.warning('No worker asked for work for %.0f s: %s.', now_s - self._last_s, situation)
    return True
