"""The samples of one call on their way from the engine's thread to whoever waits for them.

A ticket holds the newest state of every sample and no history of it: however slow the reader, its memory is bounded by
the tokens that the call may sample. Written by the engine's thread, read by one asyncio task.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlax_stack.errors import RlaxError
from rlax_stack.rollout.requests import GenerationRequest, PromptScore
from rlax_stack.types import FinishReason


class DeadlineError(RlaxError):
  """A call was not finished by its deadline."""


class Update(NamedTuple):
  """A sample so far; all arrays [T], one value per sampled token."""

  index: int  # of the sample in the call
  tokens: np.ndarray  # int32
  log_probs_t: np.ndarray  # float32, of the distribution that was sampled
  raw_log_probs_t: np.ndarray  # float32, of the model at temperature 1
  version_t: np.ndarray  # int32
  finish_reason: FinishReason | None  # None while it runs
  top_ids_t: np.ndarray | None = (
    None  # int32 [T, K], the likeliest tokens where they were asked for
  )
  top_log_probs_t: np.ndarray | None = None  # float32 [T, K], of the model at temperature 1


@dataclasses.dataclass
class CallTimes:
  """When things happened, on the monotonic clock in seconds; None until they did."""

  arrived_s: float
  admitted_s: float | None = None  # the first sample got a slot
  first_token_s: float | None = None  # the first token reached this process
  finished_s: float | None = None  # the last sample ended


class Ticket:
  """One call.

  Args:
    requests: its samples.
    deadline_s: on the monotonic clock.
    streaming: whether the reader wants samples before they end.
    num_scores: prompts that are scored for it; `scores` holds those that are, in order.
  """

  def __init__(
    self,
    requests: Sequence[GenerationRequest],
    *,
    deadline_s: float,
    streaming: bool = False,
    num_scores: int = 0,
  ):
    self.requests, self.num_scores = tuple(requests), num_scores
    self.scores: list[PromptScore] = []
    self.groups = tuple(dict.fromkeys(request.group_id for request in requests))
    self.deadline_s, self.streaming = deadline_s, streaming
    self.times = CallTimes(time.monotonic())
    self._loop = asyncio.get_running_loop()
    self._changed = asyncio.Event()
    self._lock = threading.Lock()
    self._fresh: dict[int, Update] = {}
    self._open = set(range(len(self.requests)))
    self._failure: Exception | None = None

  @property
  def done(self) -> bool:
    """Whether every sample has ended and every prompt is scored, or the call has failed."""
    return self._complete or self._failure is not None

  @property
  def _complete(self) -> bool:
    return not self._open and len(self.scores) == self.num_scores

  def put(self, updates: Sequence[Update]) -> None:
    """From the engine's thread: the newest state of some samples."""
    now = time.monotonic()
    with self._lock:
      for update in updates:
        self._fresh[update.index] = update
        if update.finish_reason is not None:
          self._open.discard(update.index)
      if self.times.first_token_s is None and any(len(update.tokens) for update in updates):
        self.times.first_token_s = now
      if self._complete:
        self.times.finished_s = now
    self._notify()

  def put_scores(self, scores: Sequence[PromptScore]) -> None:
    """From the engine's thread: the scores of its next prompts."""
    with self._lock:
      self.scores += scores
      if self._complete:
        self.times.finished_s = time.monotonic()
    self._notify()

  def fail(self, error: Exception) -> None:
    """From the engine's thread: nothing more will come."""
    self._failure = error
    self._notify()

  async def updates(self) -> list[Update]:
    """Waits for news; the newest state of every sample that has any, an empty list when all were told.

    Raises:
      DeadlineError: the deadline passed first.
      Exception: what the engine's thread failed with.
    """
    while True:
      self._changed.clear()
      with self._lock:
        fresh, self._fresh = self._fresh, {}
        done = self._complete
      if self._failure is not None:
        raise self._failure
      if fresh or done:
        return [fresh[index] for index in sorted(fresh)]
      left_s = self.deadline_s - time.monotonic()
      try:
        await asyncio.wait_for(self._changed.wait(), max(0.0, left_s))
      except TimeoutError:
        raise DeadlineError('the call was not finished by its deadline.') from None

  async def results(self) -> list[Update]:
    """Every sample at its end, in order, once prompts are scored too; errors as of `updates`."""
    last: dict[int, Update] = {}
    while updates := await self.updates():
      last.update((update.index, update) for update in updates)
    return [last[index] for index in range(len(self.requests))]

  def _notify(self) -> None:
    # The reader's loop may have been closed while the engine was still decoding for it.
    if not self._loop.is_closed():
      self._loop.call_soon_threadsafe(self._changed.set)
