"""Samples one token per row from logits [V, M], without a sort and without random numbers per vocabulary entry.

A token is found by inverting the cumulative distribution in two levels: first a block of the vocabulary, then a token
within it, from two uniforms that are a pure function of the sample and the position. Filters are thresholds on the
logit, found by bisection on the ordered integer form of a float, and run only when some row asks for them.

Order, as elsewhere: temperature, top-k, top-p of what top-k left, min-p. Ties at a threshold are all kept. The ids of
what is kept can be given too: a learner needs them to form the probability that a token was drawn with.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.types import KEPT_OVERFLOW

_BLOCK = 128  # vocabulary entries in a block of the two-level inverse
_BISECTIONS = 32  # a float32 has 32 bits


class RowSampling(NamedTuple):
  """How each of M rows is sampled."""

  temperature: Any  # float32 [M], 0 is greedy
  top_k: Any  # int32 [M], 0 is off
  top_p: Any  # float32 [M], 1 is off
  min_p: Any  # float32 [M], 0 is off


class Sampled(NamedTuple):
  """One token per row."""

  token: jax.Array  # int32 [M]
  log_prob: jax.Array  # float32 [M], of the distribution that was sampled (0 where greedy)
  raw_log_prob: jax.Array  # float32 [M], of the model at temperature 1, unfiltered
  kept_ids: jax.Array | None = None  # int32 [M, K], see `kept_ids`; None where K is 0


def raw_log_prob(logits: jax.Array, token: jax.Array) -> jax.Array:
  """Log-probs float32 [M] of int32 token [M] under logits [V, M] at temperature 1."""
  chosen = jnp.take_along_axis(logits, token[None], axis=0)[0]
  return chosen - jax.nn.logsumexp(logits, axis=0)


def top_log_probs(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The `count` likeliest tokens of each column of logits [V, M]: ids int32 and log-probs float32, [M, count].

  Where the vocabulary is smaller, ids of -1 with log-probs of -inf fill the end.
  """
  values, ids = jax.lax.top_k(logits.T, min(count, logits.shape[0]))
  ids, values = ids.astype(jnp.int32), values - jax.nn.logsumexp(logits, axis=0)[:, None]
  missing = ((0, 0), (0, count - ids.shape[1]))
  return jnp.pad(ids, missing, constant_values=-1), jnp.pad(
    values, missing, constant_values=-jnp.inf
  )


def _ordered(x: jax.Array) -> jax.Array:
  """int32 that sorts as the float does; its own inverse up to the cast."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _from_ordered(order: jax.Array) -> jax.Array:
  bits = order ^ ((order >> 31) & jnp.int32(0x7FFFFFFF))
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest_threshold(x: jax.Array, enough: Any) -> jax.Array:
  """Per column of x [V, M], the largest t for which `enough(x >= t)` (bool [M]) holds; monotone in t."""
  low, high = _ordered(jnp.min(x, 0)), _ordered(jnp.max(x, 0))

  def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bounds  # low is enough, above high is not
    middle = (low | high) - ((low ^ high) >> 1)  # mean rounded up, without overflow
    holds = enough(x >= _from_ordered(middle)[None, :])
    return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

  return _from_ordered(jax.lax.fori_loop(0, _BISECTIONS, halve, (low, high))[0])


def filter_threshold(scaled: jax.Array, sampling: RowSampling) -> jax.Array:
  """Smallest kept value per column.

  Args:
    scaled: float32 [V, M], logits over temperature, largest 0 in every column.
    sampling: of the M rows.

  Returns:
    float32 [M]: tokens with scaled >= threshold stay.
  """
  wanted = jnp.where(sampling.top_k > 0, sampling.top_k, scaled.shape[0])

  def count(kept: jax.Array) -> jax.Array:
    return jnp.sum(kept, 0, dtype=jnp.int32) >= wanted

  by_count = _largest_threshold(scaled, count)
  weights = jnp.where(scaled >= by_count[None, :], jnp.exp(scaled), 0.0)
  mass = sampling.top_p * jnp.sum(weights, 0)

  def mass_reached(kept: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(kept, weights, 0.0), 0) >= mass

  by_mass = _largest_threshold(scaled, mass_reached)
  by_mass = jnp.where(sampling.top_p < 1, by_mass, -jnp.inf)
  by_ratio = jnp.where(sampling.min_p > 0, jnp.log(sampling.min_p), -jnp.inf)
  return jnp.maximum(jnp.maximum(by_count, by_mass), by_ratio)


def kept_ids(scaled: jax.Array, kept: jax.Array, filters: jax.Array, count: int) -> jax.Array:
  """The tokens that a filter left to be drawn from.

  Args:
    scaled: float32 [V, M], logits over temperature; -inf are never drawn.
    kept: bool [V, M], not below the threshold.
    filters: bool [M], whether the row has a filter.
    count: K.

  Returns:
    int32 [M, K]: ids, likeliest first, filled with -1; all -1 without a filter; KEPT_OVERFLOW and then -1 where more
    than K are kept.
  """
  kept &= scaled > -jnp.inf
  left = jnp.where(kept, scaled, -jnp.inf)
  values, ids = jax.lax.top_k(left.T, min(count, left.shape[0]))
  ids = jnp.where(values > -jnp.inf, ids.astype(jnp.int32), -1)
  ids = jnp.pad(ids, ((0, 0), (0, count - ids.shape[1])), constant_values=-1)
  marked = jnp.full((1, count), -1, jnp.int32).at[0, 0].set(KEPT_OVERFLOW)
  overflows = jnp.sum(kept, 0, dtype=jnp.int32) > count
  ids = jnp.where(overflows[:, None], marked, ids)
  return jnp.where(filters[:, None], ids, -1)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
  """Index per column of weights [N, M] where the cumulative share passes uniform [M]; never a weight of 0."""
  cumulative = jnp.cumsum(weights, axis=0)
  positive = weights > 0
  passed = (cumulative > (uniform * cumulative[-1])[None, :]) & positive
  last = weights.shape[0] - 1 - jnp.argmax(positive[::-1], axis=0)  # if rounding passed the end
  return jnp.where(jnp.any(passed, 0), jnp.argmax(passed, 0), last).astype(jnp.int32)


def _block_of(table: jax.Array, block: jax.Array) -> jax.Array:
  """[N, B, M], [M] -> [B, M]: each column's own block."""
  return jnp.take_along_axis(table, block[None, None, :], axis=0)[0]


def _pad_vocabulary(logits: jax.Array) -> jax.Array:
  missing = -logits.shape[0] % _BLOCK
  return jnp.pad(logits, ((0, missing), (0, 0)), constant_values=-jnp.inf) if missing else logits


def sample(
  logits: jax.Array, uniforms: jax.Array, sampling: RowSampling, kept_tokens: int = 0
) -> Sampled:
  """Draws one token per column.

  Args:
    logits: float32 [V, M].
    uniforms: float32 [M, 2] in [0, 1).
    sampling: per-row parameters.
    kept_tokens: K, ids of each row's kept set that are given at most; 0 gives none.
  """
  x = _pad_vocabulary(logits)
  size, rows = x.shape
  blocks = (size // _BLOCK, _BLOCK, rows)
  x = jax.lax.optimization_barrier(x)
  block_largest = x.reshape(blocks).max(1)
  largest = block_largest.max(0)
  greedy = sampling.temperature <= 0
  inverse = jnp.where(greedy, 1.0, 1.0 / jnp.where(greedy, 1.0, sampling.temperature))

  def total(weights: jax.Array) -> jax.Array:
    return weights.reshape(blocks).sum(1).sum(0)

  filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
  whole = jnp.full((rows, kept_tokens), -1, jnp.int32) if kept_tokens else None

  def plain() -> tuple[jax.Array, jax.Array, jax.Array | None]:
    weights = jnp.exp(x - largest[None, :])
    return weights, total(weights), whole

  def scaled() -> tuple[jax.Array, jax.Array, jax.Array | None]:
    shifted = x - largest[None, :]
    return jnp.exp(shifted * inverse[None, :]), total(jnp.exp(shifted)), whole

  def filtered() -> tuple[jax.Array, jax.Array, jax.Array | None]:
    shifted = x - largest[None, :]
    scores = jax.lax.optimization_barrier(shifted * inverse[None, :])
    kept = scores >= filter_threshold(scores, sampling)[None, :]
    ids = kept_ids(scores, kept, filters & ~greedy, kept_tokens) if kept_tokens else None
    return jnp.where(kept, jnp.exp(scores), 0.0), total(jnp.exp(shifted)), ids

  path = jnp.where(jnp.any(filters & ~greedy), 2, jnp.any(inverse != 1).astype(jnp.int32))
  weights, raw_total, ids = jax.lax.switch(path, (plain, scaled, filtered))
  weights = jax.lax.optimization_barrier(weights).reshape(blocks)

  block_sums = weights.sum(1)
  block = jnp.where(
    greedy,
    jnp.argmax(block_largest, axis=0).astype(jnp.int32),
    _invert(block_sums, uniforms[:, 0]),
  )
  own_logits = _block_of(x.reshape(blocks), block)
  within = jnp.where(
    greedy,
    jnp.argmax(own_logits, axis=0).astype(jnp.int32),
    _invert(_block_of(weights, block), uniforms[:, 1]),
  )
  shifted = jnp.take_along_axis(own_logits, within[None, :], axis=0)[0] - largest
  log_prob = shifted * inverse - jnp.log(block_sums.sum(0))
  return Sampled(
    block * _BLOCK + within,
    jnp.where(greedy, 0.0, log_prob),
    shifted - jnp.log(raw_total),
    ids,
  )
