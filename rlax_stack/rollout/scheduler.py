"""Continuous batching over an engine: who waits, who runs under which weights, and when a sample is done.

Samples wait in order of arrival. Between two decode chunks free slots are refilled; a chunk ends early when enough rows
have finished and others wait. When pages run short, the youngest rows are set back: their tokens stay, and they go on
later. Not for what happens in the slots (decode_batch.py). Not thread-safe: one thread owns a scheduler.

Invariant: the tokens and log-probs of a sample depend on the weights, its prompt, its sampling parameters and its
identity, never on the slot, on the other rows, on when it was admitted, or on whether it was set back or moved here.
"""

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlax_stack.errors import FleetError
from rlax_stack.rollout.decode_batch import DecodeBatch, SchedulerStats
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.prefix_table import PrefixKey, prefix_key
from rlax_stack.rollout.requests import (
  FinishedSample,
  GenerationRequest,
  PartialSample,
  PromptScore,
  check_partial,
  check_request,
  check_text,
)
from rlax_stack.rollout.rows import Row, row_of
from rlax_stack.rollout.score_batches import attention_in_text, score_texts, with_attention
from rlax_stack.types import FinishReason

SWAP_MODES = ('in_place', 'retract', 'drain')
_STOP_STRING_STEPS = (
  8  # between looks at the text: what was sampled past a stop string is lost work
)

Identity = tuple[int, int]


class Scheduler:
  """Runs requests on one engine with one set of weights at a time.

  Args:
    engine: compiled programs.
    run_seed: seed of samples whose SamplingParams.seed is None, in [0, 2**32).
    decode_text: tokens -> text; needed only by requests with stop strings.
    swap_mode: what running rows do when weights change; see `swap_params`.
  """

  def __init__(
    self,
    engine: Engine,
    *,
    run_seed: int = 0,
    decode_text: Callable[[Sequence[int]], str] | None = None,
    swap_mode: str = 'in_place',
  ):
    if swap_mode not in SWAP_MODES:
      raise ValueError(f'unknown {swap_mode=}. Choose from {", ".join(SWAP_MODES)}.')
    self._engine, self._sizes = engine, engine.engine_config
    self._run_seed, self._decode_text = run_seed, decode_text
    self._swap_mode = swap_mode
    # A refill costs a few per cent of a step, an idle slot one part in `slots`: wait for a few.
    self._refill = max(1, self._sizes.slots // 16)
    self._pending: tuple[Any, int] | None = None  # weights that wait for running rows to end
    self._waiting: collections.deque[Row] = collections.deque()
    self._wanted: collections.Counter[bytes] = collections.Counter()  # prefixes of waiting rows
    self._identities: set[Identity] = set()
    self._arrivals, self._paused = 0, False
    self._outbox: list[FinishedSample] = []
    self.stats = SchedulerStats()
    self._batch = DecodeBatch(
      engine,
      run_seed=run_seed,
      decode_text=decode_text,
      is_wanted=self._is_wanted,
      stats=self.stats,
    )

  @property
  def version(self) -> int:
    """Version of the weights in use, -1 before the first."""
    return self._batch.version

  @property
  def newest_version(self) -> int:
    """Version of the newest weights, which may wait for running rows to end."""
    return self._pending[1] if self._pending else self.version

  @property
  def num_running(self) -> int:
    """Slots in use."""
    return self._batch.num_rows

  @property
  def num_waiting(self) -> int:
    """Samples without a slot."""
    return len(self._waiting)

  @property
  def num_stored_prefixes(self) -> int:
    """Pieces of prefixes in the prefix table, those that nobody reads included."""
    return len(self._batch.table)

  @property
  def pages_in_use(self) -> tuple[int, int]:
    """Pages of prefixes that rows read, and pages of rows' own tokens."""
    return self._batch.table.pages_in_use, self._sizes.suffix_pages - self._batch.pages.num_free

  @property
  def free_capacity(self) -> int:
    """Samples to submit now, so that somebody waits whenever a slot falls free; none while a swap waits."""
    if self._pending is not None:
      return 0
    return max(0, self._sizes.slots + self._refill - self.num_running - self.num_waiting)

  @property
  def has_work(self) -> bool:
    """Whether step() has anything to do or to hand over."""
    return bool(self.num_running or self._waiting or self._outbox or self._pending)

  # Weights.

  def prepare(self, params: Any) -> Any:
    """The serving form of weights (the tree of models/decoder.py), computed; from any thread, while steps go on."""
    return jax.block_until_ready(self._engine.load_params(params))

  def swap_params(self, params: Any, version: int) -> None:
    """`swap_prepared` of weights that are prepared now; the caller waits for them."""
    self.swap_prepared(self.prepare(params), version)

  def swap_prepared(self, fresh: Any, version: int) -> None:
    """Takes new weights between chunks: one reference changes. Samples that start later use no older KV.

    By swap_mode, running rows: 'in_place' keep their KV, and later tokens carry the new version; 'retract' lose it and
    go on after all their tokens were computed anew; 'drain' end under the old weights, while nobody else starts (steps
    go on meanwhile; the version changes when the last one has ended).

    Raises:
      ValueError: the version is older than the one in use.
    """
    newest = self.newest_version
    if version < newest:
      raise ValueError(f'Versions only grow: got {version} while {newest} is in use.')
    if version == newest:
      return
    self._set_back([slot for slot, row in self._batch.rows if not row.started])
    if self._swap_mode == 'retract':
      self._set_back([slot for slot, _ in self._batch.rows])
    if self._swap_mode == 'drain' and self.num_running:
      self._pending = (fresh, version)
    else:
      self._load(fresh, version)

  def warm_up(self) -> None:
    """Compiles every program of the engine on nothing, so that no later step does; needs weights."""
    sizes = self._sizes
    longest = sizes.max_prefix_tokens if self._swap_mode == 'retract' else sizes.max_prompt_tokens
    self._batch.warm_up(follows=longest > sizes.prefill_chunk)

  # Work.

  def submit(self, request: GenerationRequest) -> None:
    """Queues a sample.

    Raises:
      PromptTooLongError: it does not fit the context.
      ValueError: a parameter is out of range, or the sample is in flight already.
    """
    self._check(request)
    self._arrivals += 1
    self._enqueue(Row(request, self._arrivals))

  def import_row(self, partial: PartialSample) -> None:
    """Queues a half-done sample that another scheduler gave away; its engine must have the same sizes.

    Raises:
      PromptTooLongError, ValueError: see `submit`; its tokens do not fit its request.
    """
    check_partial(partial, self._engine.config, self._sizes)
    self._check(partial.request)
    self._arrivals += 1
    self._enqueue(row_of(partial, self._arrivals))

  def export_row(self, group_id: int, sample_index: int) -> PartialSample:
    """Gives a sample away, waiting or running, with its tokens so far.

    Raises:
      KeyError: no such sample is in flight.
    """
    identity = (group_id, sample_index)
    taken = self._take_out(lambda request: request.identity == identity)
    if not taken:
      raise KeyError(f'sample {sample_index} of group {group_id} is not in flight here.')
    return taken[0].partial(self._run_seed)

  def progress(self) -> dict[Identity, PartialSample]:
    """The samples in flight and their tokens so far."""
    rows = [*self._waiting, *(row for _, row in self._batch.rows)]
    return {row.request.identity: row.partial(self._run_seed) for row in rows}

  def pause(self) -> None:
    """step() does nothing until `resume`; everything else goes on."""
    self._paused = True

  def resume(self) -> None:
    """Ends a pause."""
    self._paused = False

  def step(self) -> list[FinishedSample]:
    """Refills free slots, runs one decode chunk and returns the samples that ended, in no particular order."""
    if self.version < 0 and self.has_work:
      raise FleetError('There are no weights yet. Call swap_params before step.')
    finished, self._outbox = self._outbox, []
    if self._paused:
      return finished
    start = time.perf_counter()
    busy_before = self.stats.prefill_s + self.stats.insert_s + self.stats.decode_s
    self._requeue(self._batch.make_room(self._sizes.chunk_steps))
    self._admit()
    done = self._batch.start()
    if any(row.started for _, row in self._batch.rows):
      # Where nobody waits, those that ended may complete a group and make room for others to be leased.
      stop_after = min(len(self._waiting) or self._refill, self._refill)
      done += self._batch.decode(self._steps(), stop_after)
    self._close(done)
    busy = self.stats.prefill_s + self.stats.insert_s + self.stats.decode_s - busy_before
    self.stats.host_s += time.perf_counter() - start - busy
    return finished + [with_attention(self._engine, self._batch.params, each) for each in done]

  def _steps(self) -> int:
    watched = any(row.request.sampling.stop_strings for _, row in self._batch.rows)
    return min(self._sizes.chunk_steps, _STOP_STRING_STEPS) if watched else self._sizes.chunk_steps

  def generate_all(self, requests: Sequence[GenerationRequest]) -> list[FinishedSample]:
    """Runs requests to the end and returns their samples in the same order; other work goes on meanwhile.

    Raises:
      FleetError: the scheduler is paused.
    """
    if self._paused:
      raise FleetError('The scheduler is paused. Call resume before generate_all.')
    for request in requests:
      self.submit(request)
    done: dict[Identity, FinishedSample] = {}
    asked = {request.identity for request in requests}
    others = []
    while len(done) < len(asked):
      for sample in self.step():
        if sample.request.identity in asked:
          done[sample.request.identity] = sample
        else:
          others.append(sample)
    self._outbox += others
    return [done[request.identity] for request in requests]

  def score(self, sequences: Sequence[np.ndarray], top: int = 0) -> list[PromptScore]:
    """Log-probs of the tokens of texts (int32 [T] each) under the weights in use, in order.

    Between two steps, at once and in a pause too; samples in flight are not touched. The first text of a padded length
    waits for its program to compile.

    Args:
      sequences: whole texts, at most max_prompt_tokens + max_new_tokens each.
      top: likeliest tokens per position; above 0 the ranks of the text's own tokens come too.

    Raises:
      FleetError: there are no weights yet.
      PromptTooLongError, ValueError: see `check_text`.
    """
    params, version = self._params_for(sequences, top), self.version
    return score_texts(self._engine, params, sequences, top=top, version=version)

  def attention_received(self, tokens: np.ndarray, distance: int = 1) -> np.ndarray:
    """Attention that each token of a text (int32 [T]) gets from those `distance` or more after it, float32 [T].

    Summed over those, averaged over layers and heads; when and with which errors as `score`.
    """
    if distance < 0:
      raise ValueError(f'distance must be at least 0, got {distance}.')
    return attention_in_text(self._engine, self._params_for([tokens]), tokens, distance)

  def cancel(self, group_id: int) -> list[FinishedSample]:
    """Ends a group's samples at once; what was sampled comes back with FinishReason.ABORT."""
    return self._abort(lambda request: request.group_id == group_id)

  def cancel_sample(self, group_id: int, sample_index: int) -> list[FinishedSample]:
    """Ends one sample at once, as `cancel` does a group; nothing where it is not in flight."""
    return self._abort(lambda request: request.identity == (group_id, sample_index))

  # The queue.

  def _load(self, fresh: Any, version: int) -> None:
    in_flight = [*self._waiting, *(row for _, row in self._batch.rows)]
    self.stats.carried_samples += sum(bool(row.parts) for row in in_flight)
    self._batch.load(fresh, version)

  def _check(self, request: GenerationRequest) -> None:
    check_request(request, self._engine.config, self._sizes)
    if request.sampling.stop_strings and self._decode_text is None:
      raise ValueError('stop_strings need text: give the Scheduler a decode_text function.')
    if request.identity in self._identities:
      raise ValueError(
        f'Sample {request.sample_index} of group {request.group_id} is in flight already. '
        'Give every sample its own (group_id, sample_index).'
      )

  def _params_for(self, sequences: Sequence[np.ndarray], top: int = 0) -> Any:
    """The weights in use, to run over texts that are checked here."""
    for tokens in sequences:
      check_text(tokens, top, self._engine.config, self._sizes)
    if self.version < 0:
      raise FleetError('There are no weights yet. Call swap_params before score.')
    return self._batch.params

  def _enqueue(self, row: Row) -> None:
    self._identities.add(row.request.identity)
    self._waiting.append(row)
    self._wanted[prefix_key(0, row.prefix)[1]] += 1

  def _unwant(self, row: Row) -> None:
    prefix = prefix_key(0, row.prefix)[1]
    self._wanted[prefix] -= 1
    if self._wanted[prefix] <= 0:
      del self._wanted[prefix]

  def _is_wanted(self, key: PrefixKey) -> bool:
    return key[0] == self.version and self._wanted[key[1]] > 0

  def _admit(self) -> None:
    """Gives slots to waiting rows, oldest first, until one finds no room."""
    if self._pending is not None:
      if self.num_running:
        return
      (fresh, version), self._pending = self._pending, None
      self._load(fresh, version)
    while self._waiting:
      row = self._waiting[0]
      self._unwant(row)
      if not self._batch.place(row):
        self._wanted[prefix_key(0, row.prefix)[1]] += 1
        return
      self._waiting.popleft()

  def _set_back(self, slots: Sequence[int]) -> None:
    self._requeue([self._batch.remove(slot) for slot in slots])

  def _requeue(self, rows: Sequence[Row]) -> None:
    """Rows that lost their slots wait again, where they stood."""
    if not rows:
      return
    self.stats.retracted_rows += sum(bool(row.parts) for row in rows)
    for row in rows:
      self._enqueue(row)
    self._waiting = collections.deque(sorted(self._waiting, key=lambda row: row.order))

  def _take_out(self, chosen: Callable[[GenerationRequest], bool]) -> list[Row]:
    """Removes samples, waiting and running."""
    running = [slot for slot, row in self._batch.rows if chosen(row.request)]
    taken = [self._batch.remove(slot) for slot in running]
    for row in [row for row in self._waiting if chosen(row.request)]:
      self._waiting.remove(row)
      self._unwant(row)
      taken.append(row)
    self._identities -= {row.request.identity for row in taken}
    return taken

  def _abort(self, chosen: Callable[[GenerationRequest], bool]) -> list[FinishedSample]:
    aborted = [row.finished(FinishReason.ABORT) for row in self._take_out(chosen)]
    self.stats.finished_samples += len(aborted)
    return aborted

  def _close(self, done: Sequence[FinishedSample]) -> None:
    self._identities -= {sample.request.identity for sample in done}
    self.stats.finished_samples += len(done)
