"""Stops a run whose verifiers fail: a failed verdict is dropped and counted, so too many would bias what is trained."""

import collections
from collections.abc import Mapping
from typing import Any

from rlax_stack.errors import RewardError


class RewardGuard:
  """Watches the fraction of failed verdicts over the last samples, and groups that failed whole in a row."""

  def __init__(
    self, *, max_failure_fraction: float, window: int = 256, max_failed_groups_in_row: int = 8
  ):
    """Args: `window` in samples: the fraction counts from then on; `max_failure_fraction` in [0, 1]."""
    self._max_failure_fraction = max_failure_fraction
    self._window = window
    self._max_failed_groups_in_row = max_failed_groups_in_row
    self._recent: collections.deque[tuple[int, int]] = (
      collections.deque()
    )  # (samples, failed) by group
    self._failed_groups_in_row = 0
    self._failed_total = 0

  @property
  def failed_total(self) -> int:
    """Failed verdicts of the whole run."""
    return self._failed_total

  def add(self, num_samples: int, failures: list[str]) -> None:
    """Takes in one delivered group.

    Args:
      num_samples: samples of the group.
      failures: why each failed sample failed.

    Raises:
      RewardError: too large a fraction failed, or too many groups failed whole in a row.
    """
    self._failed_total += len(failures)
    self._recent.append((num_samples, len(failures)))
    total = sum(n for n, _ in self._recent)
    while total - self._recent[0][0] >= self._window:
      total -= self._recent.popleft()[0]
    failed = sum(n for _, n in self._recent)
    self._failed_groups_in_row = (
      self._failed_groups_in_row + 1 if len(failures) == num_samples else 0
    )
    if self._failed_groups_in_row >= self._max_failed_groups_in_row:
      raise RewardError(
        f'Every verdict failed in {self._failed_groups_in_row} groups in a row; the last: {failures[-1]}. '
        'Mend the verifier: failed samples are dropped, never scored 0.'
      )
    if total >= self._window and failed > self._max_failure_fraction * total:
      last = failures[-1] if failures else 'in an earlier group'
      raise RewardError(
        f'{failed} of the last {total} verdicts failed (limit {self._max_failure_fraction:.2%}); '
        f'the last: {last}. Mend the verifier or raise max_reward_failure_fraction.'
      )

  def state(self) -> dict[str, Any]:
    """JSON value."""
    return {
      'recent': [list(pair) for pair in self._recent],
      'in_row': self._failed_groups_in_row,
      'failed_total': self._failed_total,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Inverse of `state`."""
    self._recent = collections.deque((int(n), int(failed)) for n, failed in state['recent'])
    self._failed_groups_in_row = int(state['in_row'])
    self._failed_total = int(state['failed_total'])
