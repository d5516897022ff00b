"""Rows that start, as the engine's arrays of one value per slot (numpy, on the host)."""

from collections.abc import Mapping

import numpy as np

from rlax_stack import rng
from rlax_stack.rollout.engine_state import EngineConfig, NewRows
from rlax_stack.rollout.logit_controls import LogitControls
from rlax_stack.rollout.rows import Row
from rlax_stack.rollout.sampler import RowSampling
from rlax_stack.types import SamplingParams


def make_new_rows(engine: EngineConfig, starting: Mapping[int, Row], *, run_seed: int) -> NewRows:
  """Rows to start; slots that are not in `starting` are left alone by the engine.

  Args:
    engine: sizes of the arrays.
    starting: slot -> row whose prefix is stored.
    run_seed: for requests without a seed of their own.
  """
  new = _empty(engine)
  for slot, row in starting.items():
    wish, piece = row.request.sampling, row.piece
    if piece is None or piece.index is None:
      raise ValueError(f'the prefix of slot {slot} is not stored. This is a defect.')
    new.start[slot], new.entry[slot] = True, piece.index
    new.prefix_length[slot], new.max_tokens[slot] = len(piece.prefix), row.left
    known = row.forced(1)
    new.forced[slot] = known[0] if known.size else -1
    sampling = new.sampling
    sampling.temperature[slot], sampling.top_k[slot] = wish.temperature, wish.top_k
    sampling.top_p[slot], sampling.min_p[slot] = wish.top_p, wish.min_p
    seed = run_seed if wish.seed is None else wish.seed
    request = row.request
    group = request.group_id if request.rng_group_id is None else request.rng_group_id
    new.key[slot] = rng.sample_key_data(seed, group, request.sample_index)
    new.stop_ids[slot, : len(wish.stop_token_ids)] = wish.stop_token_ids
    new.top_log_probs[slot] = wish.top_log_probs
    if new.controls is not None:
      _set_controls(new.controls, slot, wish, recomputed=row.recomputed)
      new.prefix[slot, : len(piece.prefix)] = piece.prefix
      new.prompt_length[slot] = len(row.request.prompt_tokens)
  return new


def _empty(engine: EngineConfig) -> NewRows:
  m, controls = engine.slots, None
  if engine.logit_controls:
    controls = LogitControls(
      min_tokens=np.zeros(m, np.int32),
      repetition=np.ones(m, np.float32),
      presence=np.zeros(m, np.float32),
      frequency=np.zeros(m, np.float32),
      bias_ids=np.full((m, engine.max_logit_bias), -1, np.int32),
      bias=np.zeros((m, engine.max_logit_bias), np.float32),
    )
  return NewRows(
    start=np.zeros(m, bool),
    entry=np.zeros(m, np.int32),
    prefix_length=np.ones(m, np.int32),
    max_tokens=np.ones(m, np.int32),
    forced=np.full(m, -1, np.int32),
    sampling=RowSampling(
      temperature=np.zeros(m, np.float32),
      top_k=np.zeros(m, np.int32),
      top_p=np.ones(m, np.float32),
      min_p=np.zeros(m, np.float32),
    ),
    key=np.zeros((m, 2), np.uint32),
    stop_ids=np.full((m, engine.max_stop_ids), -1, np.int32),
    top_log_probs=np.zeros(m, np.int32),
    controls=controls,
    prefix=np.zeros((m, engine.max_prefix_tokens), np.int32) if controls else None,
    prompt_length=np.zeros(m, np.int32) if controls else None,
  )


def _set_controls(
  controls: LogitControls, slot: int, wish: SamplingParams, *, recomputed: int
) -> None:
  controls.min_tokens[slot] = max(0, wish.min_tokens - recomputed)
  controls.repetition[slot] = wish.repetition_penalty
  controls.presence[slot], controls.frequency[slot] = wish.presence_penalty, wish.frequency_penalty
  for i, (token, bias) in enumerate(wish.logit_bias):
    controls.bias_ids[slot, i], controls.bias[slot, i] = token, bias
