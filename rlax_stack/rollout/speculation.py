"""Several tokens of a row in one decode step: drafts are checked in the columns of slots that stand idle.

A decode step costs the same whatever its slots hold. Where few rows run, the idle columns take the next tokens that
somebody proposes for a running row: column d holds its d-th proposed token, at its own position, and writes and reads
the row's own pages like any other column. A proposal stands where the token sampled before it, with the randomness of
its position, is that very token; after the first one that is not, the rest is forgotten. The accepted tokens and their
log-probs are those of decoding one by one, bit for bit, whoever proposed them.

Not for who proposes (drafts.py on the host, self_drafts.py on the device). See "Fast Inference from Transformers via
Speculative Decoding", Leviathan et al. (https://arxiv.org/abs/2211.17192); with proposals that are certain its
acceptance rule accepts as often as this one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack import rng
from rlax_stack.models.config import ModelConfig
from rlax_stack.pallas_kernels.decode_work import WorkList
from rlax_stack.rollout.engine_state import (
  LENGTH,
  RUNNING,
  STOPPED,
  DecodeState,
  EngineConfig,
  ResultTokens,
  RowState,
  empty_result,
)
from rlax_stack.rollout.row_steps import goes_on, likeliest
from rlax_stack.rollout.sampler import RowSampling, Sampled, sample
from rlax_stack.rollout.self_drafts import draft_ahead
from rlax_stack.rollout.serving import ServingParams

# (params, state, work, suffix_pages) -> logits [V, M], the suffix KV and the experts of each column
Forward = Callable[..., tuple[jax.Array, Any, Any, Any]]


class Columns(NamedTuple):
  """Which column works for which row; W columns at most work for one."""

  owner: Any  # int32 [M], slot of the row that the column works for
  offset: Any  # int32 [M], how many tokens after the row's newest one
  used: Any  # bool [M]
  # A running row's columns by offset, its slot first; M where there is none.
  of_row: Any  # int32 [M, W]


class Proposals(NamedTuple):
  """Next tokens of each row from the start of a call, -1 where there is none."""

  forced: Any  # int32 [K, M], taken whatever is sampled
  drafts: Any  # int32 [K, M], taken where they are what is sampled


class _Taken(NamedTuple):
  """What rows took in one step, [M, W] each."""

  token: jax.Array
  accepted: jax.Array
  finish: jax.Array


def speculate(
  forward: Forward,
  config: ModelConfig,
  engine: EngineConfig,
  params: ServingParams,
  state: DecodeState,
  work: WorkList,
  suffix_pages: jax.Array,
  columns: Columns,
  proposals: Proposals,
  version: jax.Array,
  steps: jax.Array,
  stop_after: jax.Array,
  depth: jax.Array,
) -> tuple[DecodeState, ResultTokens]:
  """As `generate` of the engine, with up to W tokens of a row per step.

  Args:
    forward: one decode step of the columns that stand in the rows of a state.
    config: shape of the model.
    engine: sizes; W is max_draft + 1.
    params: of the model.
    state: donated.
    work: what columns read of the prefix table.
    suffix_pages: int32 [M, pages_per_sample] of the rows.
    columns: who works for whom.
    proposals: at least chunk_steps * W of them, for every row without a gap.
    version: int32 [].
    steps: int32 [], at most chunk_steps.
    stop_after: int32 [], ends the call once so many rows have finished; 0 does not.
    depth: int32 [], tokens of a row that params.draft adds to the proposals in each step, at most max_draft.

  Returns:
    The state, and ResultTokens of N = chunk_steps * W entries per row, in the order of the tokens.
  """
  before, first = jnp.sum(state.rows.active), state.rows.count
  pages = suffix_pages[columns.owner]
  shape = (engine.chunk_steps, engine.max_draft + 1, engine.slots)
  result = empty_result(config, engine, shape, state.rows.finish, version)

  def going(carry: tuple[RowState, Any, Any, ResultTokens]) -> jax.Array:
    rows, _, _, result = carry
    return goes_on(rows, result, before, steps, stop_after)

  def step(
    carry: tuple[RowState, Any, Any, ResultTokens],
  ) -> tuple[RowState, Any, Any, ResultTokens]:
    rows, suffix_k, suffix_v, result = carry
    ahead = _known_ahead(rows, proposals, rows.count - first, engine.max_draft)
    current = state._replace(rows=rows, suffix_k=suffix_k, suffix_v=suffix_v)
    if params.draft is not None:
      decode = functools.partial(forward, params.draft, work=work, suffix_pages=pages)
      ahead, suffix_k, suffix_v = draft_ahead(decode, current, ahead, columns.of_row, depth)
    at = _columns_of(rows, columns, ahead)
    current = state._replace(rows=at, suffix_k=suffix_k, suffix_v=suffix_v)
    logits, suffix_k, suffix_v, experts = forward(params, current, work, pages)
    uniforms = rng.token_uniforms(at.key, at.position + 1)
    drawn = sample(logits, uniforms, at.sampling, engine.kept_tokens)
    known = _proposed(proposals.forced, columns, (rows.count - first)[columns.owner])
    taken = _take(rows, at, columns, jnp.where(known >= 0, known, drawn.token))
    found = (drawn, experts, likeliest(engine, logits, at))
    result = _recorded(engine, result, taken, found, columns)
    rows = _advance(rows, taken)
    return rows, suffix_k, suffix_v, result._replace(finish=rows.finish, steps=result.steps + 1)

  carry = (state.rows, state.suffix_k, state.suffix_v, result)
  rows, suffix_k, suffix_v, result = jax.lax.while_loop(going, step, carry)

  return state._replace(rows=rows, suffix_k=suffix_k, suffix_v=suffix_v), _in_order(result)


def _recorded(
  engine: EngineConfig,
  result: ResultTokens,
  taken: _Taken,
  found: tuple[Sampled, Any, tuple[Any, Any]],
  columns: Columns,
) -> ResultTokens:
  """The result with one more step: what rows took, and what their columns found (drawn, experts, likeliest)."""
  i, (drawn, experts, tops) = result.steps, found

  def put(table: jax.Array, value: jax.Array) -> jax.Array:
    return table.at[i].set(value[jnp.minimum(columns.of_row, engine.slots - 1)].swapaxes(0, 1))

  result = result._replace(
    tokens=result.tokens.at[i].set(taken.token.T),
    log_probs=put(result.log_probs, drawn.log_prob),
    raw_log_probs=put(result.raw_log_probs, drawn.raw_log_prob),
    valid=result.valid.at[i].set(taken.accepted.T),
  )
  if result.kept_ids is not None and drawn.kept_ids is not None:
    result = result._replace(kept_ids=put(result.kept_ids, drawn.kept_ids))
  if result.experts is not None:
    result = result._replace(experts=put(result.experts, experts))
  if result.top_ids is None or result.top_log_probs is None:
    return result
  ids, values = tops
  return result._replace(
    top_ids=put(result.top_ids, ids), top_log_probs=put(result.top_log_probs, values)
  )


def _in_order(result: ResultTokens) -> ResultTokens:
  """[N, W, M] as [N * W, M]: the order of a row's tokens."""

  def flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])

  shared = {'finish': result.finish, 'steps': result.steps}
  flattened = jax.tree.map(flat, result._replace(finish=None, steps=None))
  return flattened._replace(**shared)


def _proposed(table: jax.Array, columns: Columns, taken: jax.Array) -> jax.Array:
  """For every column the token of table [K, M] at its offset after `taken` [M] tokens of this call; -1 past the end."""
  index = taken + columns.offset
  inside = index < table.shape[0]
  return jnp.where(inside, table[jnp.where(inside, index, 0), columns.owner], -1)


def _known_ahead(rows: RowState, proposals: Proposals, taken: jax.Array, most: int) -> jax.Array:
  """Proposals for the next `most` tokens of every row, int32 [most, M], -1 from the first gap on."""
  everyone = jnp.arange(rows.token.shape[0], dtype=jnp.int32)

  def at(offset: int) -> jax.Array:
    places = Columns(everyone, jnp.full_like(everyone, offset), None, None)
    forced = _proposed(proposals.forced, places, taken)
    return jnp.where(forced >= 0, forced, _proposed(proposals.drafts, places, taken))

  return jnp.stack([at(offset) for offset in range(most)])


def _columns_of(rows: RowState, columns: Columns, ahead: jax.Array) -> RowState:
  """The rows of a step with a column in each slot; `ahead` [W - 1, M] are the proposals of every row."""
  owner, offset = columns.owner, columns.offset
  # What stands in a column is the token before the one that it samples.
  proposed = ahead[jnp.maximum(offset - 1, 0), owner]
  token = jnp.where(offset == 0, rows.token[owner], proposed)
  count = rows.count[owner] + offset
  usable = columns.used & rows.active[owner] & (token >= 0) & (count < rows.max_tokens[owner])
  return rows._replace(
    token=jnp.where(usable, token, 0),
    position=rows.position[owner] + offset,
    count=jnp.where(usable, count, 0),
    active=usable,
    sampling=RowSampling._make(x[owner] for x in rows.sampling),
    key=rows.key[owner],
    top_log_probs=rows.top_log_probs[owner],
  )


def _take(rows: RowState, at: RowState, columns: Columns, token: jax.Array) -> _Taken:
  """Which tokens [M] of columns their rows take: up to the first that was proposed wrongly or that ends the row."""
  last = token.shape[0] - 1
  column = jnp.minimum(columns.of_row, last)
  there = (columns.of_row <= last) & at.active[column]
  given, stood = token[column], at.token[column]
  right = jnp.concatenate([jnp.ones_like(there[:, :1]), stood[:, 1:] == given[:, :-1]], axis=1)
  stops = jnp.any(rows.stop_ids[:, None, :] == given[:, :, None], axis=2)
  width = jnp.arange(1, given.shape[1] + 1, dtype=jnp.int32)[None]
  full = rows.count[:, None] + width >= rows.max_tokens[:, None]
  finish = jnp.where(stops, STOPPED, jnp.where(full, LENGTH, RUNNING)).astype(jnp.int32)
  on = finish == RUNNING
  goes_on = jnp.concatenate([jnp.ones_like(on[:, :1]), on[:, :-1]], axis=1)
  accepted = jnp.cumprod((there & right & goes_on).astype(jnp.int32), axis=1) > 0
  return _Taken(given, accepted, finish)


def _advance(rows: RowState, taken: _Taken) -> RowState:
  """Rows after the tokens that they took."""
  count = jnp.sum(taken.accepted, axis=1, dtype=jnp.int32)
  newest = jnp.maximum(count - 1, 0)[:, None]

  def last(value: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(count > 0, jnp.take_along_axis(value, newest, axis=1)[:, 0], old)

  finish = last(taken.finish, rows.finish)
  return rows._replace(
    token=last(taken.token, rows.token),
    position=rows.position + count,
    count=rows.count + count,
    finish=finish,
    active=jnp.where(count > 0, finish == RUNNING, rows.active),
  )
