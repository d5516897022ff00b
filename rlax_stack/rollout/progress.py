"""Samples on their way: what a scheduler's running rows have so far, for those who stream them."""

from typing import NamedTuple

import numpy as np

from rlax_stack.rollout.scheduler import Scheduler


class Partial(NamedTuple):
  """A running sample so far; all arrays [T], one value per sampled token. A later one continues an earlier one."""

  tokens: np.ndarray  # int32
  log_probs_t: np.ndarray  # float32, of the distribution that was sampled
  raw_log_probs_t: np.ndarray  # float32, of the model at temperature 1
  version_t: np.ndarray  # int32


def progress(scheduler: Scheduler) -> dict[tuple[int, int], Partial]:
  """Identity -> what was sampled so far, of every running sample; from the thread that owns the scheduler."""
  found = {}
  for row in scheduler._rows:
    if row is None:
      continue
    values = np.concatenate(row.parts, axis=1) if row.parts else np.zeros((4, 0))
    found[row.request.identity] = Partial(
      values[0].astype(np.int32),
      values[1].astype(np.float32),
      values[2].astype(np.float32),
      values[3].astype(np.int32),
    )
  return found
