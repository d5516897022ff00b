"""Rows in slots: gives them a prefix and pages, starts them, decodes them, and takes everything back.

Not for who comes first (scheduler.py). Invariant: a row in a slot holds one use of the last piece of its prefix and
pages for all its tokens on the device; a row out of a slot holds nothing but its tokens.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlax_stack.pallas_kernels.decode_work import WorkList, make_work_list
from rlax_stack.rollout.drafts import next_wish, plan_columns, propose
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import LENGTH, RUNNING, STOPPED, ResultTokens
from rlax_stack.rollout.new_rows import make_new_rows
from rlax_stack.rollout.prefiller import Prefiller
from rlax_stack.rollout.prefix_table import PrefixKey, PrefixTable
from rlax_stack.rollout.requests import FinishedSample
from rlax_stack.rollout.rows import Row, Sampled
from rlax_stack.rollout.speculation import Columns, Proposals
from rlax_stack.rollout.suffix_pages import SuffixPages
from rlax_stack.types import FinishReason

_REST_CHUNKS = 8
_REASONS = {STOPPED: FinishReason.STOP, LENGTH: FinishReason.LENGTH}


@dataclasses.dataclass
class SchedulerStats:
  """Counters since the start; times in seconds of wall clock."""

  prefill_tokens: int = 0  # prefix tokens computed, padding not counted
  prefill_padded_tokens: int = 0  # padding included
  sampled_tokens: int = 0
  replayed_tokens: int = 0  # fed again to rows that had lost their KV
  drafted_tokens: int = 0  # proposed tokens that idle columns checked
  accepted_tokens: int = 0  # of those, the ones that stood
  copy_steps: int = 0  # decode steps of the quantised copy that proposes tokens
  retracted_rows: int = 0  # times a row lost its slot before it was done
  carried_samples: int = 0  # times a half-done sample went on under newer weights
  decode_steps: int = 0
  slot_steps: int = 0  # decode steps x slots
  row_steps: int = 0  # of these, the ones in which the slot's row decoded
  chunks: int = 0
  finished_samples: int = 0
  prefill_s: float = 0.0
  insert_s: float = 0.0
  decode_s: float = 0.0
  host_s: float = 0.0  # bookkeeping, stop strings and transfers of step()


class DecodeBatch:
  """The slots of one engine.

  Args:
    engine: compiled programs.
    run_seed: seed of samples without their own.
    decode_text: tokens -> text, for stop strings.
    is_wanted: whether a waiting row begins with the prefix of a key.
    stats: counted up.
  """

  def __init__(
    self,
    engine: Engine,
    *,
    run_seed: int,
    decode_text: Callable[[Sequence[int]], str] | None,
    is_wanted: Callable[[PrefixKey], bool],
    stats: SchedulerStats,
  ):
    sizes = engine.engine_config
    self._engine, self._sizes, self._stats = engine, sizes, stats
    self._run_seed, self._decode_text = run_seed, decode_text or str
    self._state = engine.init_decode_state()
    self._rows: list[Row | None] = [None] * sizes.slots
    self._prefiller = Prefiller(engine)
    self.table = PrefixTable(
      pages=sizes.prefix_pages,
      page_size=sizes.page_size,
      chunk=sizes.prefill_chunk,
      entries=sizes.slots,
      is_wanted=is_wanted,
    )
    self.pages = SuffixPages(
      pages=sizes.suffix_pages,
      page_size=sizes.suffix_page_size,
      rows=sizes.slots,
      per_row=sizes.pages_per_sample,
    )
    self.params: Any = None
    self.version = -1

  @property
  def rows(self) -> Iterator[tuple[int, Row]]:
    """Slots in use and their rows."""
    return ((slot, row) for slot, row in enumerate(self._rows) if row is not None)

  @property
  def num_rows(self) -> int:
    """Slots in use."""
    return sum(row is not None for row in self._rows)

  def load(self, params: Any, version: int) -> None:
    """Takes weights in serving form. Rows that decode keep their KV; no row may be between slot and start."""
    self.params, self.version = params, version
    for _, row in self.rows:
      row.kv_version = -1
    self._prefiller.forget()
    self.table.sweep(version)

  def place(self, row: Row) -> bool:
    """Gives a row a slot, pieces of its prefix and its first pages; False, and nothing given, where one is missing."""
    slot = next((slot for slot, other in enumerate(self._rows) if other is None), None)
    if slot is None:
      return False
    row.begin(self.version)
    prefix = row.prefix
    if not self.pages.grow(slot, min(row.left, self._sizes.chunk_steps + 1)):
      return False
    piece = self.table.find(self.version, prefix)
    if piece is None:
      pieces = self.table.allocate(self.version, prefix)
      if pieces is None:
        self.pages.release(slot)
        return False
      self._prefiller.add(pieces)
      piece = pieces[-1]
    self.table.acquire(piece)
    row.piece = piece
    self._rows[slot] = row
    return True

  def remove(self, slot: int) -> Row:
    """Takes a row out of its slot, with its tokens and nothing else."""
    row = self._row(slot)
    if row.started:
      self._state = self._engine.free_resource(slot, self._state)
    self._give_back(slot)
    row.set_back()
    return row

  def make_room(self, steps: int) -> list[Row]:
    """Gives every decoding row pages for so many more tokens; returns the rows that had to go, youngest first."""
    gone = []
    for slot, row in sorted(self.rows, key=lambda item: item[1].order):
      while self._rows[slot] is row and not self.pages.grow(slot, min(row.left, row.fed + steps)):
        youngest = max(self.rows, key=lambda item: item[1].order)[0]
        gone.append(self.remove(youngest))
    return gone

  def start(self) -> list[FinishedSample]:
    """Computes prefixes within the budget and starts the rows that have theirs; returns samples that ended at once."""
    begin = time.perf_counter()
    if self._prefiller.num_pending:
      decoding = any(row.started for _, row in self.rows)
      budget = self._sizes.prefill_budget
      self._state = self._prefiller.run(self.params, self._state, budget)
      while self._prefiller.num_pending and not decoding and not self._ready():
        self._state = self._prefiller.run(self.params, self._state, budget)
      jax.block_until_ready(self._state.prefix_logits)
      self._stats.prefill_tokens = self._prefiller.tokens
      self._stats.prefill_padded_tokens = self._prefiller.padded_tokens
    self._stats.prefill_s += time.perf_counter() - begin
    ready = self._ready()
    if not ready:
      return []
    begin = time.perf_counter()
    new = make_new_rows(self._sizes, ready, run_seed=self._run_seed)
    self._state, result = self._engine.bulk_insert(self._state, new, self.version)
    result = jax.device_get(result)
    self._stats.insert_s += time.perf_counter() - begin
    for row in ready.values():
      row.started = True
    return self._collect(self._with_experts(result, ready), new.forced[None])

  def _with_experts(self, result: ResultTokens, ready: Mapping[int, Row]) -> ResultTokens:
    """First tokens with the experts of the token before each, the last one of its prefix."""
    if not self._sizes.record_experts:
      return result
    model = self._engine.config
    shape = (1, self._sizes.slots, model.num_layers, model.experts_per_token)
    before = np.full(shape, -1, np.int16)
    for slot, row in ready.items():
      if row.piece is None or row.piece.experts is None:
        raise ValueError(f'the experts of slot {slot} are not recorded. This is a defect.')
      before[0, slot] = row.piece.experts[-1]
      if not row.length:
        row.prompt_experts = row.piece.all_experts
    return result._replace(experts=before)

  def decode(self, steps: int, stop_after: int) -> list[FinishedSample]:
    """Up to `steps` steps of the started rows; `make_room` comes before. Returns the samples that ended."""
    copying = self._copying()
    proposals, wishes = self._proposals(steps, lookup=not copying)
    columns = self._columns(wishes, steps)
    limits = {'version': self.version, 'steps': steps, 'stop_after': stop_after}
    begin, depth = time.perf_counter(), 0
    if columns is None:
      inputs = (self._work_list(), self.pages.table.copy(), proposals.forced)
      self._state, result = self._engine.generate(self.params, self._state, *inputs, **limits)
    else:
      depth = int(columns.offset.max()) if copying else 0
      inputs = (self._work_list(columns.owner), self.pages.table.copy(), columns, proposals)
      self._state, result = self._engine.speculate(
        self.params, self._state, *inputs, **limits, depth=depth
      )
    result = jax.device_get(result)
    self._stats.decode_s += time.perf_counter() - begin
    self._stats.chunks += 1
    self._stats.decode_steps += int(result.steps)
    self._stats.copy_steps += depth * int(result.steps)
    # The first entry of a step tells whether the row decoded in it.
    rows = result.valid[:: len(result.valid) // self._sizes.chunk_steps]
    self._stats.slot_steps += int(result.steps) * self._sizes.slots
    self._stats.row_steps += int(rows.sum())
    if columns is not None:
      self._count_drafts(result, columns)
    return self._collect(result, proposals.forced)

  def _copying(self) -> bool:
    """Whether the quantised copy of the weights proposes tokens now."""
    decoding = sum(row.started for _, row in self.rows)
    return self._sizes.draft_weights != 'none' and decoding <= self._sizes.draft_rows

  def _proposals(self, steps: int, *, lookup: bool) -> tuple[Proposals, dict[int, int]]:
    """Next tokens of the rows that decode, and how many of them each wants checked at once.

    Without `lookup` more proposals come from the copy of the weights.
    """
    sizes, wishes = self._sizes, {}
    shape = (sizes.chunk_steps * (sizes.max_draft + 1), sizes.slots)
    forced, drafts = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    idle = any(row is None or not row.started for row in self._rows)
    for slot, row in self.rows:
      if not row.started:
        continue
      known = row.forced(shape[0])
      forced[: len(known), slot] = known
      wishes[slot] = 0
      if sizes.max_draft and idle:
        _try_again(row)
        proposed = row.request.prompt_tokens[:0]
        if row.wish:
          proposed = propose(row, shape[0] - len(known), lookup=lookup)
        drafts[len(known) : len(known) + len(proposed), slot] = proposed
        wish = sizes.max_draft if len(known) else row.wish
        there = len(known) + len(proposed) if lookup else sizes.max_draft
        wishes[slot] = min(wish, sizes.max_draft, there)
    return Proposals(forced, drafts), wishes

  def _columns(self, wishes: dict[int, int], steps: int) -> Columns | None:
    """Who works for whom; None where no idle column has anything to check."""
    for slot, row in self.rows:
      most = min(row.left, row.fed + steps * (1 + wishes.get(slot, 0)))
      if wishes.get(slot) and not self.pages.grow(slot, most):
        wishes[slot] = 0  # its pages are short: one token at a time
    if not any(wishes.values()):
      return None
    return plan_columns(wishes, slots=self._sizes.slots, width=self._sizes.max_draft + 1)

  def _count_drafts(self, result: ResultTokens, columns: Columns) -> None:
    valid = result.valid.reshape(self._sizes.chunk_steps, -1, self._sizes.slots)
    for slot, row in self.rows:
      columns_at_once = int((columns.of_row[slot, 1:] < self._sizes.slots).sum())
      if row.started and columns_at_once:
        offered = columns_at_once * int(valid[:, 0, slot].sum())
        accepted = int(valid[:, 1:, slot].sum())
        row.wish = next_wish(row.wish, offered, accepted, most=self._sizes.max_draft)
        self._stats.drafted_tokens += offered
        self._stats.accepted_tokens += accepted

  def warm_up(self, *, follows: bool) -> None:
    """Compiles every program on nothing; `follows` says whether prefixes may have more than one piece."""
    self._state = self._prefiller.warm_up(self.params, self._state, follows=follows)
    nobody = make_new_rows(self._sizes, {}, run_seed=self._run_seed)
    self._state, _ = self._engine.bulk_insert(self._state, nobody, self.version)
    self._state, result = self._engine.generate(
      self.params,
      self._state,
      self._work_list(),
      self.pages.table.copy(),
      np.full((self._sizes.chunk_steps, self._sizes.slots), -1, np.int32),
      version=self.version,
      steps=1,
    )
    if self._sizes.max_draft:
      proposals, wishes = self._proposals(1, lookup=True)
      columns = plan_columns(wishes, slots=self._sizes.slots, width=self._sizes.max_draft + 1)
      inputs = (self._work_list(columns.owner), self.pages.table.copy(), columns, proposals)
      self._state, result = self._engine.speculate(
        self.params, self._state, *inputs, version=self.version, steps=1
      )
    idle = [slot for slot, row in enumerate(self._rows) if row is None]
    for slot in idle[:1]:
      self._state = self._engine.free_resource(slot, self._state)
    jax.block_until_ready(result)

  def _ready(self) -> dict[int, Row]:
    return {
      slot: row
      for slot, row in self.rows
      if not row.started and row.piece is not None and row.piece.ready
    }

  def _work_list(self, owner: np.ndarray | None = None) -> WorkList:
    """What every column reads; `owner` says for which row it works, its own slot's by default."""
    views = [row.piece.view if row and row.started and row.piece else None for row in self._rows]
    if owner is not None:
      views = [views[slot] for slot in owner]
    return make_work_list(
      views,
      page_size=self._sizes.page_size,
      rows_per_block=self._sizes.rows_per_block,
      max_items=self._sizes.max_items,
    )

  def _collect(self, result: ResultTokens, forced: np.ndarray) -> list[FinishedSample]:
    """Adds a result's tokens to their rows and ends the rows that are done; `forced` [K, M] are not new."""
    finished = []
    values = (result.tokens, result.log_probs, result.raw_log_probs, result.versions)
    values = (*values, result.top_ids, result.top_log_probs, result.kept_ids, result.experts)
    for slot in np.flatnonzero(result.valid.any(0)).tolist():
      row, places = self._row(slot), np.flatnonzero(result.valid[:, slot])
      known = int((forced[:, slot] >= 0).sum())
      taken, fresh = len(places), places[known:]
      count = len(fresh)
      row.fed += taken
      self._stats.sampled_tokens += count
      self._stats.replayed_tokens += taken - count
      if count:
        row.parts.append(Sampled._make(None if x is None else x[fresh, slot] for x in values))
      stop_strings = row.request.sampling.stop_strings
      if count and stop_strings and row.cut_at_stop_string(count, self._decode_text):
        if result.finish[slot] == RUNNING:
          self._state = self._engine.free_resource(slot, self._state)
        finished.append(self._finish(slot, FinishReason.STOP_STRING))
      elif result.finish[slot] != RUNNING:
        finished.append(self._finish(slot, _REASONS[int(result.finish[slot])]))
    return finished

  def _finish(self, slot: int, reason: FinishReason) -> FinishedSample:
    row = self._row(slot)
    self._give_back(slot)
    return row.finished(reason)

  def _give_back(self, slot: int) -> None:
    piece = self._row(slot).piece
    if piece is not None:
      self.table.release(piece)
    self.pages.release(slot)
    self._rows[slot] = None

  def _row(self, slot: int) -> Row:
    row = self._rows[slot]
    if row is None:
      raise ValueError(f'slot {slot} is free, but the engine answered for it. This is a defect.')
    return row


def _try_again(row: Row) -> None:
  """A row whose proposals failed asks for one again after a while: its text may have begun to repeat."""
  row.rest = row.rest + 1 if row.wish == 0 else 0
  if row.rest >= _REST_CHUNKS:
    row.wish, row.rest = 1, 0
