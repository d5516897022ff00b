"""The rollout worker: leases groups, pulls weights, generates, scores and delivers, until there is no more work.

Coordinator and parameter server are given as they are used here (fleet/ has the embedded ones): the worker holds no
record of a run, so it may be killed at any instant and its leases run out. It keeps nothing of jax but the scheduler's.
Scoring runs in a thread of its own, so that slow verifiers do not hold up decoding.
"""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from absl import logging

from rlax_stack.errors import FleetError, StaleLeaseError
from rlax_stack.rollout.answer_store import AnswerStore
from rlax_stack.rollout.joint_scheduler import JointScheduler
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.plan import Plan, Strategy, Task
from rlax_stack.rollout.trajectory import scored, text_places
from rlax_stack.types import Message, Prompt, Reward, SamplingParams, Trajectory

_BLOCK_S = 0.2  # blocking calls are this short, so that a stop is seen at once

ScoreFunction = Callable[[Sequence[str], Sequence[Prompt]], list[Reward]]


class ChatTokenizer(Protocol):
  """What the worker needs of models/tokenizer.py."""

  @property
  def stop_token_ids(self) -> Sequence[int]:
    """Tokens that end an answer."""
    ...

  def encode_chat(self, messages: Sequence[Message]) -> np.ndarray:
    """Tokens of a prompt, int32 [P]."""
    ...

  def encode(self, text: str) -> np.ndarray:
    """Tokens of a text, int32 [T]."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Text of sampled tokens."""
    ...


@dataclasses.dataclass
class WorkerStats:
  """Counters since the start; seconds of wall clock. Generation itself is in SchedulerStats."""

  groups_delivered: int = 0
  groups_lost: int = 0  # leases that ran out or went to another worker
  swaps: int = 0
  swap_s: float = 0.0  # decoding stood still
  lease_wait_s: float = 0.0  # idle: nothing to generate and no lease to have
  score_s: float = 0.0  # in the scoring thread, beside decoding


@dataclasses.dataclass
class _Open:
  """A leased group on its way."""

  lease: Any
  plan: Plan
  trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
  scored: concurrent.futures.Future | None = None


class RolloutWorker:
  """`worker(coordinator, parameter_server, stop_event)` runs until Finished or the event.

  Args:
    scheduler: owned by the worker from now on; others use `generate_all`.
    tokenizer: renders prompts and decodes samples.
    score: (texts, prompts) -> one Reward each; called from one thread.
    sampling: of every sample; without stop_token_ids it takes the tokenizer's.
    strategy: how the samples of a group are drawn.
    merge: makes a model's weights of what is published; None where those are published.
    tokenizers: of the roles whose policy has another one than `tokenizer`.
    answers: drafts of samples and their randomness, None for none; only where a sample is one request.
    worker_id: name in leases and logs.
    extend_every_s: heartbeat of leases, well below the lease timeout.
  """

  def __init__(
    self,
    scheduler: Scheduler | JointScheduler,
    *,
    tokenizer: ChatTokenizer,
    score: ScoreFunction,
    sampling: SamplingParams,
    strategy: Strategy | None = None,
    merge: Callable[[Any], Any] | None = None,
    tokenizers: Mapping[str, ChatTokenizer] | None = None,
    answers: AnswerStore | None = None,
    worker_id: str = 'rollout-0',
    extend_every_s: float = 10.0,
  ):
    if not sampling.stop_token_ids:
      sampling = dataclasses.replace(sampling, stop_token_ids=tuple(tokenizer.stop_token_ids))
    self._scheduler, self._tokenizer, self._score = scheduler, tokenizer, score
    self._sampling, self._worker_id = sampling, worker_id
    self._tokenizers = dict(tokenizers or {})
    self._strategy = Independent() if strategy is None else strategy
    self._answers, self._merge = answers, merge
    self._greedy = dataclasses.replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    self._extend_every_s, self._extended_s = extend_every_s, 0.0
    self._open: dict[int, _Open] = {}
    self._turn = threading.Condition()  # guards the scheduler; guests go before the worker's loop
    self._guests = 0
    self._loader = concurrent.futures.ThreadPoolExecutor(1, f'{worker_id}-weights')
    self._coming: tuple[int, concurrent.futures.Future] | None = None  # weights on their way
    self.stats, self._told = WorkerStats(), (0, 0, 0, 0.0, 0, 0)

  @property
  def scheduler(self) -> Scheduler | JointScheduler:
    """For reading its counters."""
    return self._scheduler

  def __call__(self, coordinator: Any, parameter_server: Any, stop_event: threading.Event) -> None:
    """The worker's life. Raises whatever stops it, PromptTooLongError included."""
    with concurrent.futures.ThreadPoolExecutor(1, f'{self._worker_id}-score') as scorers:
      while not stop_event.is_set():
        with self._turn:
          self._turn.wait_for(lambda: not self._guests)
          self._pull(parameter_server.latest())
        more = self._lease_groups(coordinator, parameter_server, stop_event, scorers)
        with self._turn:
          self._turn.wait_for(lambda: not self._guests)
          finished = self._scheduler.step()
        self._take(finished, scorers)
        self._heartbeat(coordinator)
        self._deliver_scored(coordinator)
        if not more and not self._open:
          return

  def generate_all(
    self, requests: Sequence[GenerationRequest], snapshot: Any = None
  ) -> list[FinishedSample]:
    """Samples of `requests` in order, for evaluation; from any thread, between the worker's own chunks.

    Args:
      requests: to run; their group ids must differ from those of the run.
      snapshot: (version, params) to use where it is newer than the weights at hand.
    """
    with self._turn:
      self._guests += 1
      try:
        self._pull(snapshot, wait=True)
        return self._scheduler.generate_all(requests)
      finally:
        self._guests -= 1
        self._turn.notify_all()

  def figures(self) -> dict[str, float]:
    """Figures of the engine since the last call, by the name of their metric; guests included. For one caller."""
    stats = self._scheduler.stats
    now = (stats.row_steps, stats.slot_steps, stats.carried_samples, self.stats.swap_s)
    now = (*now, stats.accepted_tokens, stats.drafted_tokens)
    told, self._told = self._told, now
    rows, slots, carried, swap_s, accepted, drafted = (
      new - old for new, old in zip(now, told, strict=True)
    )
    values = {'rollout/samples_carried': float(carried), 'rollout/swap_s': swap_s}
    shares = {
      'rollout/slot_occupancy': (rows, slots),
      'rollout/drafts_accepted': (accepted, drafted),
    }
    return values | {name: part / whole for name, (part, whole) in shares.items() if whole}

  def warm_up(self, snapshot: Any) -> None:
    """Takes the weights of `snapshot` and compiles every program of the engine."""
    with self._turn:
      self._pull(snapshot, wait=True)
      self._scheduler.warm_up()

  def _pull(self, snapshot: Any, *, wait: bool = False) -> None:
    """Takes newer weights between chunks. While rows decode, and without `wait`, they are prepared in a thread."""
    scheduler = self._scheduler
    while True:
      if self._coming is None:
        if snapshot is None or snapshot.version <= scheduler.newest_version:
          return
        fresh = self._loader.submit(self._prepared, snapshot.params)
        self._coming = snapshot.version, fresh
      version, fresh = self._coming
      if scheduler.num_running and not (wait or fresh.done()):
        return
      start = time.perf_counter()
      self._coming = None
      scheduler.swap_prepared(fresh.result(), version)
      self.stats.swaps += 1
      self.stats.swap_s += time.perf_counter() - start

  def _prepared(self, published: Any) -> Any:
    """What is published, in the engine's form."""
    whole = published if self._merge is None else self._merge(published)
    return self._scheduler.prepare(whole)

  def _lease_groups(
    self,
    coordinator: Any,
    parameter_server: Any,
    stop_event: threading.Event,
    scorers: concurrent.futures.ThreadPoolExecutor,
  ) -> bool:
    """Leases while slots are free; returns whether more work may come."""
    while self._scheduler.free_capacity > 0 and not stop_event.is_set():
      idle = not self._scheduler.has_work
      start = time.perf_counter()
      # Not idle: generation goes on at once. Idle but with verdicts to come: look at those soon.
      timeout_s = (_BLOCK_S / 10 if self._open else _BLOCK_S) if idle else 0.0
      answer = coordinator.lease(self._worker_id, timeout_s=timeout_s)
      if idle:
        self.stats.lease_wait_s += time.perf_counter() - start
      if not hasattr(answer, 'prompt'):  # Wait or Finished: both carry only a reason
        return not coordinator.is_finished
      if not self._await_version(answer.min_version, parameter_server, stop_event, scorers):
        return False
      self._start_group(answer)
    return True

  def _await_version(
    self,
    version: int,
    parameter_server: Any,
    stop_event: threading.Event,
    scorers: concurrent.futures.ThreadPoolExecutor,
  ) -> bool:
    """Waits for weights that a lease asks for; False where the worker was stopped meanwhile."""
    while self._scheduler.version < version:
      if stop_event.is_set():
        return False
      try:
        snapshot = parameter_server.wait_for(version, _BLOCK_S)
      except FleetError:
        continue  # not there yet; the event is looked at before the next try
      with self._turn:
        self._turn.wait_for(lambda: not self._guests)
        self._pull(snapshot)
        # Weights may be on their way, or wait for running samples to end (swap_mode 'drain').
        finished = self._scheduler.step() if self._scheduler.version < version else []
      self._take(finished, scorers)
    return True

  def _start_group(self, lease: Any) -> None:
    """Submits the first requests of a group's plan, the greedy one in front: it starts with the group's weights."""
    extras = lease.num_samples - lease.group_size
    plan = self._strategy.plan(
      Task(
        group_id=lease.group_id,
        prompt=lease.prompt,
        prompt_tokens=np.asarray(self._tokenizer.encode_chat(lease.prompt.messages), np.int32),
        samplings=(self._sampling,) * lease.group_size + (self._greedy,) * extras,
        group_size=lease.group_size,
        version=lease.min_version,
        tokenizer=self._tokenizer,
        past=lease.past,
      )
    )
    requests, store = plan.start(), self._answers
    if store is not None:
      requests = [store.drafted(request, lease.prompt.prompt_id) for request in requests]
    self._submit(requests)
    self._open[lease.group_id] = _Open(lease, plan)

  def _submit(self, requests: Sequence[GenerationRequest]) -> None:
    with self._turn:
      self._turn.wait_for(lambda: not self._guests)
      for request in requests:
        self._scheduler.submit(request)

  def _take(
    self, finished: Sequence[FinishedSample], scorers: concurrent.futures.ThreadPoolExecutor
  ) -> None:
    """Gives finished samples to their plans; a whole group goes to be scored."""
    for sample in finished:
      group = self._open.get(sample.request.group_id)
      if group is None:
        continue  # its lease was lost meanwhile
      if self._answers is not None:
        self._answers.keep(sample, group.lease.prompt.prompt_id)
      further, complete = group.plan.take(sample)
      group.trajectories += complete
      if further:
        self._submit(further)
      if len(group.trajectories) == group.lease.num_samples:
        group.scored = scorers.submit(self._trajectories, group)

  def _trajectories(self, group: _Open) -> list[Trajectory]:
    start = time.perf_counter()
    drawn = sorted(group.trajectories, key=lambda trajectory: trajectory.sample_index)
    decoders = [self._tokenizers.get(t.role, self._tokenizer).decode for t in drawn]
    texts = [
      decode(t.tokens[text_places(t)].tolist()) for t, decode in zip(drawn, decoders, strict=True)
    ]
    rewards = self._score(texts, [group.lease.prompt] * len(texts))
    self.stats.score_s += time.perf_counter() - start
    return [
      scored(trajectory, text, reward, decode)
      for trajectory, text, reward, decode in zip(drawn, texts, rewards, decoders, strict=True)
    ]

  def _deliver_scored(self, coordinator: Any) -> None:
    for group_id, group in list(self._open.items()):
      if group.scored is None or not group.scored.done():
        continue
      del self._open[group_id]
      try:
        coordinator.deliver(group.lease, group.scored.result())
        self.stats.groups_delivered += 1
      except StaleLeaseError as error:
        self._lost(group_id, error)

  def _heartbeat(self, coordinator: Any) -> None:
    if time.monotonic() - self._extended_s < self._extend_every_s:
      return
    self._extended_s = time.monotonic()
    for group_id, group in list(self._open.items()):
      try:
        group.lease = coordinator.extend(group.lease)
      except StaleLeaseError as error:
        del self._open[group_id]
        with self._turn:
          self._turn.wait_for(lambda: not self._guests)
          self._scheduler.cancel(group_id)
        self._lost(group_id, error)

  def _lost(self, group_id: int, error: StaleLeaseError) -> None:
    self.stats.groups_lost += 1
    logging.warning('Worker %s lost group %d: %s', self._worker_id, group_id, error)
