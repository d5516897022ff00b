"""The thread that owns the scheduler, and the only way to it for everybody who serves requests.

Calls come in from asyncio tasks and are bounded at admission: more samples than the slots and `max_waiting` hold are
refused at once, so memory does not grow with the load. A call that is given up (client gone, deadline passed) is
cancelled and its slots are free after the decode chunk that is running. Prompts are scored between two chunks, not more
of them at once than are prefilled.

Invariant: a sample counts as in flight from its admission until it has left the scheduler, a prompt until it is scored.
"""

import collections
import functools
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from absl import logging

from rlax_stack.errors import FleetError
from rlax_stack.models.config import ModelConfig
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.requests import (
  FinishedSample,
  GenerationRequest,
  PartialSample,
  check_request,
  check_text,
)
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.serving.ticket import Ticket, Update
from rlax_stack.types import FinishReason, SamplingParams


class OverloadedError(FleetError):
  """Too many samples wait already. `retry_after_s` is a guess at when there is room."""

  def __init__(self, message: str, retry_after_s: int):
    super().__init__(message)
    self.retry_after_s = retry_after_s


class EngineView(NamedTuple):
  """What the engine is doing."""

  version: int  # of the weights
  running: int  # slots in use after the last step
  waiting: int  # samples admitted that had no slot then


class _Unscored(NamedTuple):
  """Prompts of a call that wait to be scored."""

  ticket: Ticket
  prompts: collections.deque[np.ndarray]
  top: int  # likeliest tokens per position


class EngineObserver(Protocol):
  """Told by the engine's thread what it measures."""

  def prefilled(self, seconds: float, tokens: int) -> None:
    """Prompts of `tokens` tokens were computed."""
    ...


class EngineBridge:
  """Serves a scheduler to asyncio tasks.

  Args:
    scheduler: with weights; owned by the bridge's thread from `start` on.
    model, sizes: of its engine, for checks before admission.
    max_waiting: samples admitted beyond the slots.
    observer: see EngineObserver.
    on_failure: called by the engine's thread when it dies.
  """

  def __init__(
    self,
    scheduler: Scheduler,
    *,
    model: ModelConfig,
    sizes: EngineConfig,
    max_waiting: int,
    observer: EngineObserver,
    on_failure: Callable[[], None] = lambda: None,
  ):
    self._scheduler, self._observer, self._on_failure = scheduler, observer, on_failure
    self.model, self.sizes = model, sizes
    self._limit = sizes.slots + max_waiting
    self._group_ids = itertools.count()
    self._running: dict[tuple[int, int], tuple[Ticket, int]] = {}  # the engine's thread only
    self._unscored: collections.deque[_Unscored] = collections.deque()  # so is this
    self._wake = threading.Condition()  # guards what follows
    self._inbox: list[Callable[[], None]] = []
    self._open: set[Ticket] = set()  # admitted, neither finished nor cancelled
    self._stopping = False
    self._in_flight = 0
    self._sample_s = 0.0  # running mean of the seconds between a call's first slot and its end
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)
    self._version, self._slots_used = scheduler.version, 0  # as of the last step
    self.failure: BaseException | None = None

  def start(self) -> None:
    """Starts the engine's thread."""
    self._thread.start()

  def stop(self, timeout_s: float) -> None:
    """Ends the thread after the chunk that it is in; calls on their way fail."""
    with self._wake:
      self._stopping = True
      self._wake.notify()
    self._thread.join(timeout_s)

  @property
  def in_flight(self) -> int:
    """Samples admitted that have not left the scheduler, and prompts that are not scored yet."""
    return self._in_flight

  @property
  def view(self) -> EngineView:
    """From any thread: what the engine is doing."""
    waiting = max(0, self._in_flight - self._slots_used)
    return EngineView(self._version, self._slots_used, waiting)

  def submit(
    self,
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    *,
    count: int = 1,
    timeout_s: float,
    streaming: bool = False,
    prompt_top: int | None = None,
  ) -> Ticket:
    """Admits `count` samples of each prompt (int32 [P]); sample j of prompt i is i * count + j of the ticket.

    Its random numbers follow from (sampling.seed, i, j) alone. With sampling.max_tokens of 0 all samples are empty and
    have ended. With `prompt_top` the prompts are scored, with so many of the likeliest tokens. Whoever submits calls
    `cancel` in the end.

    Raises:
      PromptTooLongError, ValueError: see `check_request` and `check_text`, or more than is ever admitted.
      OverloadedError: no room now.
      FleetError: the engine's thread is dead.
    """
    requests = [
      GenerationRequest(
        group_id=group_id,
        sample_index=index,
        prompt_tokens=prompt,
        sampling=sampling,
        rng_group_id=place,
      )
      for place, (prompt, group_id) in enumerate(zip(prompts, self._group_ids, strict=False))
      for index in range(count)
    ]
    for request in requests[::count]:
      if sampling.max_tokens:
        check_request(request, self.model, self.sizes)
      check_text(request.prompt_tokens, prompt_top or 0, self.model, self.sizes)
    scored = [] if prompt_top is None else prompts
    ticket = Ticket(
      requests,
      deadline_s=time.monotonic() + timeout_s,
      streaming=streaming,
      num_scores=len(scored),
    )
    self._admit(ticket, _Unscored(ticket, collections.deque(scored), prompt_top or 0))
    return ticket

  def cancel(self, ticket: Ticket) -> None:
    """Ends a call; does nothing where all its samples have ended."""
    if not ticket.done:
      self._send(functools.partial(self._cancel, ticket))

  def swap_params(self, params: Any, version: int) -> None:
    """Takes newer weights after the chunk that is running; returns at once."""
    self._send(functools.partial(self._scheduler.swap_params, params, version))

  # Callers' threads.

  def _admit(self, ticket: Ticket, unscored: _Unscored) -> None:
    wanted = _num_sampled(ticket) + ticket.num_scores
    if wanted > self._limit:
      what = 'samples and scored prompts' if ticket.num_scores else 'samples'
      raise ValueError(
        f'{wanted} {what} in one request, but at most {self._limit} are ever admitted. '
        'Ask for fewer, or raise config.serve.max_waiting.'
      )
    with self._wake:
      if self.failure is not None or self._stopping:
        raise FleetError('the engine has stopped.') from self.failure
      if self._in_flight + wanted > self._limit:
        rounds = self._in_flight / self.sizes.slots
        raise OverloadedError(
          f'{self._in_flight} samples are in flight and at most {self._limit} are admitted. Try again later.',
          max(1, min(60, round(rounds * self._sample_s))),
        )
      self._in_flight += wanted
      self._open.add(ticket)
      self._inbox.append(functools.partial(self._accept, ticket, unscored))
      self._wake.notify()

  def _send(self, message: Callable[[], None]) -> None:
    with self._wake:
      self._inbox.append(message)
      self._wake.notify()

  # The engine's thread.

  def _run(self) -> None:
    try:
      while self._take_messages():
        if self._unscored:
          self._score()
        if self._scheduler.has_work:
          self._step()
        self._look()
    except Exception as error:  # whatever the device or a defect raises: nobody may go on waiting
      logging.exception('The engine has stopped.')
      self.failure = error
    with self._wake:
      self._stopping = True
      tickets, self._open = self._open, set()
    for ticket in tickets:
      ticket.fail(FleetError('the engine has stopped.'))
    if self.failure is not None:
      self._on_failure()

  def _take_messages(self) -> bool:
    """Does what was asked for, waiting where there is nothing else to do; False when told to stop."""
    with self._wake:
      self._wake.wait_for(
        lambda: self._inbox or self._stopping or self._unscored or self._scheduler.has_work
      )
      if self._stopping:
        return False
      inbox, self._inbox = self._inbox, []
    for message in inbox:
      message()
    return True

  def _accept(self, ticket: Ticket, unscored: _Unscored) -> None:
    if unscored.prompts:
      self._unscored.append(unscored)
    if not _num_sampled(ticket):
      ticket.put([_nothing(index) for index in range(len(ticket.requests))])
      self._account([ticket] if ticket.done else [])
      return
    for index, request in enumerate(ticket.requests):
      self._scheduler.submit(request)
      self._running[request.identity] = (ticket, index)

  def _cancel(self, ticket: Ticket) -> None:
    ended = [sample for group in ticket.groups for sample in self._scheduler.cancel(group)]
    for sample in ended:
      self._running.pop(sample.request.identity, None)
    dropped = sum(len(item.prompts) for item in self._unscored if item.ticket is ticket)
    self._unscored = collections.deque(i for i in self._unscored if i.ticket is not ticket)
    with self._wake:
      self._in_flight -= len(ended) + dropped
      self._open.discard(ticket)

  def _score(self) -> None:
    """Scores prompts of the call that waits longest: one, and more within the budget of prefilled tokens."""
    ticket, prompts, top = self._unscored[0]
    chosen = [prompts.popleft()]
    while prompts and sum(map(len, chosen)) + len(prompts[0]) <= self.sizes.prefill_budget:
      chosen.append(prompts.popleft())
    if not prompts:
      self._unscored.popleft()
    if ticket.times.admitted_s is None:
      ticket.times.admitted_s = time.monotonic()
    scores = self._scheduler.score(chosen, top)
    with self._wake:
      self._in_flight -= len(chosen)
    ticket.put_scores(scores)
    self._account([ticket] if ticket.done else [])

  def _step(self) -> None:
    stats = self._scheduler.stats
    prefill_s, prefill_tokens = stats.prefill_s, stats.prefill_tokens
    start_s = time.monotonic()
    finished = self._scheduler.step()
    with self._wake:
      self._in_flight -= len(finished)
    if stats.prefill_tokens > prefill_tokens:
      self._observer.prefilled(stats.prefill_s - prefill_s, stats.prefill_tokens - prefill_tokens)
    self._look()
    news: dict[Ticket, list[Update]] = {}
    for sample in finished:
      ticket, index = self._running.pop(sample.request.identity)
      news.setdefault(ticket, []).append(_ended(index, sample))
    if any(t.streaming or t.times.admitted_s is None for t, _ in self._running.values()):
      for identity, partial in self._scheduler.progress().items():
        if len(partial.tokens):
          ticket, index = self._running[identity]
          news.setdefault(ticket, []).append(_so_far(index, partial))
    for ticket, updates in news.items():
      if ticket.times.admitted_s is None:
        ticket.times.admitted_s = max(start_s, ticket.times.arrived_s)
      ticket.put([u for u in updates if ticket.streaming or u.finish_reason])
    self._account([ticket for ticket in news if ticket.done])

  def _look(self) -> None:
    self._version, self._slots_used = self._scheduler.version, self._scheduler.num_running

  def _account(self, ended: Sequence[Ticket]) -> None:
    now = time.monotonic()
    with self._wake:
      self._open.difference_update(ended)
      for ticket in ended:
        took_s = now - (ticket.times.admitted_s or now)
        self._sample_s += (took_s - self._sample_s) * (0.1 if self._sample_s else 1.0)


def _num_sampled(ticket: Ticket) -> int:
  """Samples of a call that need a slot."""
  return sum(request.sampling.max_tokens > 0 for request in ticket.requests)


def _nothing(index: int) -> Update:
  """A sample of no token."""
  tokens, values = np.zeros(0, np.int32), np.zeros(0, np.float32)
  return Update(index, tokens, values, values, tokens, FinishReason.LENGTH)


def _so_far(index: int, partial: PartialSample) -> Update:
  return Update(
    index,
    partial.tokens,
    partial.log_probs_t,
    partial.raw_log_probs_t,
    partial.version_t,
    None,
    partial.top_ids_t,
    partial.top_log_probs_t,
  )


def _ended(index: int, sample: FinishedSample) -> Update:
  return Update(
    index,
    sample.tokens,
    sample.log_probs_t,
    sample.raw_log_probs_t,
    sample.version_t,
    sample.finish_reason,
    sample.top_ids_t,
    sample.top_log_probs_t,
  )


def fresh_seed() -> int:
  """A seed in [0, 2**32) that nobody else has: for requests that name none."""
  return secrets.randbits(32)
