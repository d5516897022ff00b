"""Computes pieces of prefixes batch by batch, first pieces and those that follow, within a budget of tokens per call.

Not for who gets pages (prefix_table.py) nor for when rows start (scheduler.py). Programs have one static shape per
bucket of first pieces and one for all that follow.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import DecodeState, EngineConfig
from rlax_stack.rollout.prefix_table import Piece
from rlax_stack.rollout.serving import ServingParams


class Prefiller:
  """Keeps the pieces that are to be computed, in the order in which they were asked for."""

  def __init__(self, engine: Engine):
    self._engine, self._sizes = engine, engine.engine_config
    self._pending: list[Piece] = []
    self.tokens = 0  # computed so far, padding not counted
    self.padded_tokens = 0

  @property
  def num_pending(self) -> int:
    """Pieces not computed yet."""
    return len(self._pending)

  def add(self, pieces: Sequence[Piece]) -> None:
    """Pieces of one prefix, in order."""
    self._pending += pieces

  def forget(self) -> None:
    """Drops what is pending; its owner has let it go."""
    self._pending.clear()

  def run(self, params: ServingParams, state: DecodeState, budget: int) -> DecodeState:
    """Computes and stores pieces until `budget` padded tokens are spent; at least one batch. `state` is donated."""
    sizes, spent = self._sizes, 0
    while self._pending and spent < budget:
      due = [p for p in self._pending if p.parent is None or p.parent.ready]
      kind = _kind(sizes, due[0])
      batch = sizes.prefill_batches(kind[1])[-1]
      chosen = [piece for piece in due if _kind(sizes, piece) == kind][:batch]
      state = self._compute(params, state, chosen, *kind)
      for piece in chosen:
        piece.ready = True
      self._pending = [piece for piece in self._pending if not piece.ready]
      spent += batch * kind[1]
    return state

  def _compute(
    self, params: ServingParams, state: DecodeState, pieces: list[Piece], follows: bool, length: int
  ) -> DecodeState:
    sizes = self._sizes
    batch = sizes.prefill_batches(length)[-1]
    tokens, lengths = np.zeros((batch, length), np.int32), np.ones(batch, np.int32)
    before = np.zeros((batch, sizes.pages_per_prefix), np.int32)
    context = np.zeros(batch, np.int32)
    # Out-of-range pages and entries are dropped by the engine: padding is stored nowhere.
    pages = np.full((batch, length // sizes.page_size), sizes.prefix_pages, np.int32)
    entries = np.full(batch, sizes.slots, np.int32)
    for i, piece in enumerate(pieces):
      tokens[i, : len(piece.tokens)], lengths[i] = piece.tokens, len(piece.tokens)
      pages[i, : len(piece.pages)] = piece.pages
      if piece.index is not None:
        entries[i] = piece.index
      if piece.parent is not None:
        earlier = piece.parent.all_pages
        before[i, : len(earlier)], context[i] = earlier, piece.start
    if follows:
      prefix: Any = self._engine.prefill_more(params, state, tokens, lengths, before, context)
    else:
      prefix = self._engine.prefill(params=params, padded_tokens=tokens, true_length=lengths)
    self.tokens += sum(len(piece.tokens) for piece in pieces)
    self.padded_tokens += tokens.size
    if prefix.experts is not None:
      experts = np.asarray(jax.device_get(prefix.experts))
      for i, piece in enumerate(pieces):
        piece.experts = experts[:, i, : len(piece.tokens)].swapaxes(0, 1).copy()
    return self._engine.insert(prefix._replace(experts=None), state, pages, entries)

  def warm_up(self, params: ServingParams, state: DecodeState, *, follows: bool) -> DecodeState:
    """Compiles the programs of all buckets, and with `follows` that of later pieces, on nothing."""
    for bucket in self._sizes.prompt_buckets:
      state = self._compute(params, state, [], False, bucket)
    if follows:
      state = self._compute(params, state, [], True, self._sizes.prefill_chunk)
    return state


def _kind(sizes: EngineConfig, piece: Piece) -> tuple[bool, int]:
  """Which program computes a piece: whether it follows another one, and the padded length."""
  if piece.parent is not None:
    return (True, sizes.prefill_chunk)
  return (False, next(size for size in sizes.prompt_buckets if size >= len(piece.tokens)))
