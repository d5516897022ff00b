"""Continuous batching over an engine: who is prefilled, which slot runs what, and when a sample is done.

Requests wait in order of arrival. Between two decode chunks every free slot is refilled: prompts not yet stored are
prefilled in batches, once per prompt and version however many samples refer to them, and rows start on them. A chunk
ends early when enough rows have finished and others wait. Not thread-safe: one thread owns a scheduler.

Invariant: the tokens and log-probs of a sample depend on the weights, its prompt, its sampling parameters and its
identity, never on the slot, on the other rows or on when it was admitted.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlax_stack.errors import FleetError
from rlax_stack.pallas_kernels.decode_work import WorkList, make_work_list
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import LENGTH, RUNNING, STOPPED, NewRows, ResultTokens
from rlax_stack.rollout.new_rows import make_new_rows
from rlax_stack.rollout.prefix_table import Entry, PrefixKey, PrefixTable, prefix_key
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest, check_request
from rlax_stack.types import FinishReason

_REASONS = {STOPPED: FinishReason.STOP, LENGTH: FinishReason.LENGTH}
_STOP_STRING_STEPS = (
  8  # steps between looks at the text: what was sampled past a stop string is lost work
)


@dataclasses.dataclass
class SchedulerStats:
  """Counters since the start; times in seconds of wall clock."""

  prefill_tokens: int = 0  # prompt tokens computed, padding not counted
  prefill_padded_tokens: int = 0  # padding included
  sampled_tokens: int = 0
  decode_steps: int = 0
  chunks: int = 0
  finished_samples: int = 0
  prefill_s: float = 0.0
  insert_s: float = 0.0
  decode_s: float = 0.0
  host_s: float = 0.0  # bookkeeping, stop strings and transfers of step()


@dataclasses.dataclass
class _Row:
  """A running sample on the host."""

  request: GenerationRequest
  entry: Entry
  parts: list[np.ndarray] = dataclasses.field(default_factory=list)  # [4, n] each, see _take

  def length(self) -> int:
    return sum(part.shape[1] for part in self.parts)


class Scheduler:
  """Runs requests on one engine with one set of weights at a time.

  Args:
    engine: compiled programs.
    run_seed: seed of samples whose SamplingParams.seed is None, in [0, 2**32).
    decode_text: tokens -> text; needed only by requests with stop strings.
  """

  def __init__(
    self,
    engine: Engine,
    *,
    run_seed: int = 0,
    decode_text: Callable[[Sequence[int]], str] | None = None,
  ):
    self._engine, self._sizes = engine, engine.engine_config
    self._run_seed, self._decode_text = run_seed, decode_text
    self._params: Any = None
    self._version = -1
    self._state = engine.init_decode_state()
    self._rows: list[_Row | None] = [None] * self._sizes.slots
    self._waiting: collections.deque[GenerationRequest] = collections.deque()
    self._wanted: collections.Counter[bytes] = collections.Counter()  # prompts of waiting requests
    self._identities: set[tuple[int, int]] = set()
    self._outbox: list[FinishedSample] = []
    self._table = PrefixTable(
      pages=self._sizes.prefix_pages,
      page_size=self._sizes.page_size,
      entries=self._sizes.slots,
      keep=self._is_wanted,
    )
    self.stats = SchedulerStats()

  @property
  def version(self) -> int:
    """Version of the weights in use, -1 before the first."""
    return self._version

  @property
  def num_running(self) -> int:
    """Slots in use."""
    return sum(row is not None for row in self._rows)

  @property
  def num_waiting(self) -> int:
    """Requests without a slot."""
    return len(self._waiting)

  @property
  def num_stored_prefixes(self) -> int:
    """Prompts whose KV is in the prefix table."""
    return len(self._table)

  @property
  def free_capacity(self) -> int:
    """Samples that could start at once: free slots less waiting requests, at least 0."""
    return max(0, self._sizes.slots - self.num_running - self.num_waiting)

  @property
  def has_work(self) -> bool:
    """Whether step() has anything to do or to hand over."""
    return bool(self.num_running or self._waiting or self._outbox)

  def swap_params(self, params: Any, version: int) -> None:
    """Takes new weights (the tree of models/decoder.py) between chunks.

    Running rows go on with their KV and their later tokens carry the new version; requests that start from now on
    never use a prefix made by older weights.

    Raises:
      ValueError: the version is older than the one in use.
    """
    if version < self._version:
      raise ValueError(f'Versions only grow: got {version} while {self._version} is in use.')
    if version == self._version:
      return
    fresh = jax.block_until_ready(self._engine.load_params(params))
    self._params, self._version = fresh, version
    self._table.sweep()

  def warm_up(self) -> None:
    """Compiles every program of the engine on nothing, so that no later step does; needs weights."""
    sizes, params = self._sizes, self._params
    for bucket in sizes.prompt_buckets:
      for batch in sizes.prefill_batches(bucket):
        prefix = self._engine.prefill(
          params=params,
          padded_tokens=np.zeros((batch, bucket), np.int32),
          true_length=np.ones(batch, np.int32),
        )
        pages = np.full((batch, bucket // sizes.page_size), sizes.prefix_pages, np.int32)
        entries = np.full(batch, sizes.slots, np.int32)
        self._state = self._engine.insert(prefix, self._state, pages, entries)
    self._state, _ = self._engine.bulk_insert(self._state, self._new_rows(()), self._version)
    self._state, result = self._engine.generate(
      params, self._state, self._work_list(), version=self._version, steps=1
    )
    idle = [slot for slot, row in enumerate(self._rows) if row is None]
    for slot in idle[:1]:
      self._state = self._engine.free_resource(slot, self._state)
    jax.block_until_ready(result)

  def submit(self, request: GenerationRequest) -> None:
    """Queues a sample.

    Raises:
      PromptTooLongError: it does not fit the context.
      ValueError: a parameter is out of range, or the sample is in flight already.
    """
    check_request(request, self._engine.config, self._sizes)
    if request.sampling.stop_strings and self._decode_text is None:
      raise ValueError('stop_strings need text: give the Scheduler a decode_text function.')
    if request.identity in self._identities:
      raise ValueError(
        f'Sample {request.sample_index} of group {request.group_id} is in flight already. '
        'Give every sample its own (group_id, sample_index).'
      )
    self._identities.add(request.identity)
    self._waiting.append(request)
    self._wanted[prefix_key(0, request.prompt_tokens)[1]] += 1

  def step(self) -> list[FinishedSample]:
    """Refills free slots, runs one decode chunk and returns the samples that ended, in no particular order."""
    if self._params is None and self.has_work:
      raise FleetError('There are no weights yet. Call swap_params before step.')
    start = time.perf_counter()
    busy_before = self.stats.prefill_s + self.stats.insert_s + self.stats.decode_s
    finished, self._outbox = self._outbox, []
    finished += self._admit()
    if self.num_running:
      finished += self._decode()
    busy = self.stats.prefill_s + self.stats.insert_s + self.stats.decode_s - busy_before
    self.stats.host_s += time.perf_counter() - start - busy
    return finished

  def generate_all(self, requests: Sequence[GenerationRequest]) -> list[FinishedSample]:
    """Runs requests to the end and returns their samples in the same order; other work goes on meanwhile."""
    for request in requests:
      self.submit(request)
    done: dict[tuple[int, int], FinishedSample] = {}
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

  def cancel(self, group_id: int) -> list[FinishedSample]:
    """Ends a group's samples at once; what was sampled comes back with FinishReason.ABORT."""
    aborted = []
    for slot, row in enumerate(self._rows):
      if row is not None and row.request.group_id == group_id:
        self._state = self._engine.free_resource(slot, self._state)
        aborted.append(self._finish(slot, FinishReason.ABORT))
    for request in [r for r in self._waiting if r.group_id == group_id]:
      self._waiting.remove(request)
      self._no_longer_waits(request)
      aborted.append(self._sample(request, np.zeros((4, 0)), FinishReason.ABORT))
    self._table.sweep()
    return aborted

  # Admission.

  def _is_wanted(self, key: PrefixKey) -> bool:
    return key[0] == self._version and self._wanted[key[1]] > 0

  def _no_longer_waits(self, request: GenerationRequest) -> None:
    prompt = prefix_key(0, request.prompt_tokens)[1]
    self._wanted[prompt] -= 1
    if not self._wanted[prompt]:
      del self._wanted[prompt]

  def _admit(self) -> list[FinishedSample]:
    """Gives free slots to waiting requests; returns samples that ended with their first token."""
    free = [slot for slot, row in enumerate(self._rows) if row is None]
    started: list[int] = []
    unstored: list[tuple[Entry, np.ndarray]] = []
    for slot in free:
      if not self._waiting:
        break
      request = self._waiting[0]
      key = prefix_key(self._version, request.prompt_tokens)
      entry = self._table.find(key)
      if entry is None:
        entry = self._table.allocate(key, len(request.prompt_tokens))
        if entry is None:
          break  # no room for the prompt until running rows give theirs back
        unstored.append((entry, request.prompt_tokens))
      self._waiting.popleft()
      self._table.acquire(entry)
      self._no_longer_waits(request)
      self._rows[slot] = _Row(request, entry)
      started.append(slot)
    if not started:
      return []
    self._prefill(unstored)
    start = time.perf_counter()
    self._state, result = self._engine.bulk_insert(
      self._state, self._new_rows(started), self._version
    )
    result = jax.device_get(result)
    self.stats.insert_s += time.perf_counter() - start
    return self._collect(result)

  def _prefill(self, unstored: list[tuple[Entry, np.ndarray]]) -> None:
    """Computes and stores prompts, bucket by bucket."""
    start = time.perf_counter()
    buckets: dict[int, list[tuple[Entry, np.ndarray]]] = {}
    for entry, tokens in unstored:
      bucket = next(size for size in self._sizes.prompt_buckets if size >= len(tokens))
      buckets.setdefault(bucket, []).append((entry, tokens))
    for bucket, prompts in sorted(buckets.items()):
      largest = self._sizes.prefill_batches(bucket)[-1]
      for first in range(0, len(prompts), largest):
        self._prefill_batch(bucket, prompts[first : first + largest])
    if unstored:
      jax.block_until_ready(self._state.prefix_logits)
    self.stats.prefill_s += time.perf_counter() - start

  def _prefill_batch(self, bucket: int, prompts: list[tuple[Entry, np.ndarray]]) -> None:
    sizes = self._sizes
    batch = next(n for n in sizes.prefill_batches(bucket) if n >= len(prompts))
    tokens = np.zeros((batch, bucket), np.int32)
    lengths = np.ones(batch, np.int32)
    # Out-of-range pages and entries are dropped by the engine: padding is stored nowhere.
    pages = np.full((batch, bucket // sizes.page_size), sizes.prefix_pages, np.int32)
    entries = np.full(batch, sizes.slots, np.int32)
    for i, (entry, prompt) in enumerate(prompts):
      tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)
      pages[i, : len(entry.view.pages)], entries[i] = entry.view.pages, entry.index
    prefix = self._engine.prefill(params=self._params, padded_tokens=tokens, true_length=lengths)
    self._state = self._engine.insert(prefix, self._state, pages, entries)
    self.stats.prefill_tokens += sum(len(prompt) for _, prompt in prompts)
    self.stats.prefill_padded_tokens += tokens.size

  def _new_rows(self, slots: Sequence[int]) -> NewRows:
    rows = {slot: self._row(slot) for slot in slots}
    starting = {slot: (row.request, row.entry.index) for slot, row in rows.items()}
    return make_new_rows(self._sizes, starting, run_seed=self._run_seed)

  # Decoding.

  def _decode(self) -> list[FinishedSample]:
    sizes = self._sizes
    watched = any(row is not None and row.request.sampling.stop_strings for row in self._rows)
    steps = min(sizes.chunk_steps, _STOP_STRING_STEPS) if watched else sizes.chunk_steps
    # A refill costs a few per cent of a step, an idle slot one part in `slots`: wait for a few.
    stop_after = min(len(self._waiting), max(1, sizes.slots // 16))
    start = time.perf_counter()
    self._state, result = self._engine.generate(
      self._params,
      self._state,
      self._work_list(),
      version=self._version,
      steps=steps,
      stop_after=stop_after,
    )
    result = jax.device_get(result)
    self.stats.decode_s += time.perf_counter() - start
    self.stats.chunks += 1
    self.stats.decode_steps += int(result.steps)
    return self._collect(result)

  def _work_list(self) -> WorkList:
    return make_work_list(
      [None if row is None else row.entry.view for row in self._rows],
      page_size=self._sizes.page_size,
      rows_per_block=self._sizes.rows_per_block,
      max_items=self._sizes.max_items,
    )

  def _collect(self, result: ResultTokens) -> list[FinishedSample]:
    """Adds a result's tokens to their rows and ends the rows that are done."""
    finished = []
    values = (result.tokens, result.log_probs, result.raw_log_probs, result.versions)
    for slot in np.flatnonzero(result.valid.any(0)).tolist():
      row, steps = self._row(slot), result.valid[:, slot]
      # float64 holds int32 tokens and float32 log-probs exactly.
      row.parts.append(np.stack([value[steps, slot].astype(np.float64) for value in values]))
      self.stats.sampled_tokens += int(steps.sum())
      if row.request.sampling.stop_strings and self._cut_at_stop_string(row):
        if result.finish[slot] == RUNNING:
          self._state = self._engine.free_resource(slot, self._state)
        finished.append(self._finish(slot, FinishReason.STOP_STRING))
      elif result.finish[slot] != RUNNING:
        finished.append(self._finish(slot, _REASONS[int(result.finish[slot])]))
    return finished

  def _cut_at_stop_string(self, row: _Row) -> bool:
    """Whether a stop string was completed; drops the tokens after the one that completed it."""
    values = np.concatenate(row.parts, axis=1)
    tokens = values[0].astype(np.int32)
    seen = values.shape[1] - row.parts[-1].shape[1]  # tokens that were looked at before

    decode_text = self._decode_text or str  # `submit` refuses stop strings without it

    def completed(count: int) -> bool:
      text = decode_text(tokens[:count].tolist())
      return any(stop in text for stop in row.request.sampling.stop_strings)

    if not completed(len(tokens)):
      return False
    count = next(n for n in range(seen + 1, len(tokens) + 1) if completed(n))
    row.parts = [values[:, :count]]
    return True

  def _row(self, slot: int) -> _Row:
    row = self._rows[slot]
    if row is None:
      raise ValueError(f'slot {slot} is free, but the engine answered for it. This is a defect.')
    return row

  def _finish(self, slot: int, reason: FinishReason) -> FinishedSample:
    row = self._row(slot)
    self._rows[slot] = None
    self._table.release(row.entry)
    values = np.concatenate(row.parts, axis=1) if row.parts else np.zeros((4, 0))
    return self._sample(row.request, values, reason)

  def _sample(
    self, request: GenerationRequest, values: np.ndarray, reason: FinishReason
  ) -> FinishedSample:
    self._identities.discard(request.identity)
    self.stats.finished_samples += 1
    return FinishedSample(
      request=request,
      tokens=values[0].astype(np.int32),
      log_probs_t=values[1].astype(np.float32),
      raw_log_probs_t=values[2].astype(np.float32),
      version_t=values[3].astype(np.int32),
      finish_reason=reason,
    )
