"""What happens to rows between the logits: they draw, take a token, and start (inside jit)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlax_stack import rng
from rlax_stack.rollout import logit_controls
from rlax_stack.rollout.engine_state import (
  LENGTH,
  RUNNING,
  STOPPED,
  EngineConfig,
  NewRows,
  ResultTokens,
  RowState,
)
from rlax_stack.rollout.sampler import Sampled, raw_log_prob, sample, top_log_probs


def draw(
  logits: jax.Array,
  rows: RowState,
  position: jax.Array,
  forced: jax.Array,
  kept_tokens: int = 0,
) -> tuple[Sampled, jax.Array]:
  """Samples at int32 position [M] from logits [V, M]; also what rows take: `forced` [M] where that is >= 0."""
  uniforms = rng.token_uniforms(rows.key, position)
  if rows.controls is None or rows.counts is None:
    drawn = sample(logits, uniforms, rows.sampling, kept_tokens)
  else:
    adjust = functools.partial(
      logit_controls.adjust,
      controls=rows.controls,
      counts=rows.counts,
      count=rows.count,
      stop_ids=rows.stop_ids,
    )
    wanted = jnp.any(logit_controls.are_on(rows.controls))
    adjusted = jax.lax.cond(wanted, adjust, lambda x: x, logits)
    drawn = sample(adjusted, uniforms, rows.sampling, kept_tokens)
    raw = jax.lax.cond(
      wanted, lambda: raw_log_prob(logits, drawn.token), lambda: drawn.raw_log_prob
    )
    drawn = drawn._replace(raw_log_prob=raw)
  return drawn, jnp.where(forced >= 0, forced, drawn.token)


def goes_on(
  rows: RowState, result: ResultTokens, before: jax.Array, steps: jax.Array, stop_after: jax.Array
) -> jax.Array:
  """Whether a call takes another step, bool []: of `before` rows some still run, and too few of them have finished."""
  running = jnp.sum(rows.active)
  finished = (stop_after > 0) & (before - running >= stop_after)
  return (result.steps < steps) & (running > 0) & ~finished


def accept(rows: RowState, token: jax.Array, who: jax.Array) -> RowState:
  """Rows `who` [M] take a token at the position after their newest one."""
  advance = who.astype(jnp.int32)
  count = rows.count + advance
  stopped = jnp.any(rows.stop_ids == token[:, None], axis=1)
  finish = jnp.where(stopped, STOPPED, jnp.where(count >= rows.max_tokens, LENGTH, RUNNING))
  finish = jnp.where(who, finish, rows.finish).astype(jnp.int32)
  counts = None if rows.counts is None else logit_controls.count_token(rows.counts, token, who)
  return rows._replace(
    token=jnp.where(who, token, rows.token),
    counts=counts,
    position=rows.position + advance,
    count=count,
    finish=finish,
    active=jnp.where(who, finish == RUNNING, rows.active),
  )


def likeliest(engine: EngineConfig, logits: jax.Array, rows: RowState) -> tuple[Any, Any]:
  """Ids and log-probs [M, max_top_log_probs] of the likeliest tokens; zeros where no row asks, None if none may."""
  tops = engine.max_top_log_probs
  if not tops:
    return None, None
  shape = (logits.shape[1], tops)
  return jax.lax.cond(
    jnp.any(rows.top_log_probs > 0),
    lambda: top_log_probs(logits, tops),
    lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)),
  )


def start_rows(
  engine: EngineConfig,
  prefix_logits: jax.Array,
  rows: RowState,
  new: NewRows,
  version: jax.Array,
) -> tuple[RowState, ResultTokens]:
  """Starts rows and draws their first tokens from their prefixes' stored logits."""
  values = rows._replace(
    position=new.prefix_length - 1,
    count=jnp.zeros_like(rows.count),
    max_tokens=new.max_tokens,
    sampling=new.sampling,
    key=new.key,
    stop_ids=new.stop_ids,
    top_log_probs=new.top_log_probs,
    controls=new.controls,
  )

  def pick(value: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(new.start.reshape((-1,) + (1,) * (old.ndim - 1)), value, old)

  counts = rows.counts
  values, rows = values._replace(counts=None), rows._replace(counts=None)
  rows = jax.tree.map(pick, values, rows)
  if counts is not None:
    counts = logit_controls.start_counts(
      counts, new.prefix, new.prefix_length, new.prompt_length, new.start
    )
  rows = rows._replace(counts=counts)
  logits = prefix_logits[new.entry].T
  drawn, token = draw(logits, rows, new.prefix_length, new.forced, engine.kept_tokens)
  ids, of_ids = likeliest(engine, logits, rows)
  rows = accept(rows, token, new.start)
  return rows, ResultTokens(
    tokens=token[None],
    log_probs=drawn.log_prob[None],
    raw_log_probs=drawn.raw_log_prob[None],
    versions=jnp.full_like(token, version)[None],
    valid=new.start[None],
    finish=rows.finish,
    steps=jnp.int32(1),
    top_ids=None if ids is None else ids[None],
    top_log_probs=None if of_ids is None else of_ids[None],
    kept_ids=None if drawn.kept_ids is None else drawn.kept_ids[None],
  )
