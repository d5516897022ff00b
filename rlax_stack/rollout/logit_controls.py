"""What a request may do to the logits before they are sampled: biases, a least length, and penalties on repetition.

Order: biases, stop tokens shut out until min_tokens, repetition, presence and frequency penalties; then the sampler's
temperature and filters. Only an engine with `logit_controls` carries these arrays.
Not for raw log-probs, which are of the model's own logits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LogitControls(NamedTuple):
  """How the logits of each of M rows are changed."""

  min_tokens: Any  # int32 [M], suffix tokens before which no stop token is sampled
  repetition: Any  # float32 [M], 1 is off: divides positive logits of tokens seen before, multiplies negative ones
  presence: Any  # float32 [M], 0 is off: subtracted from tokens sampled before
  frequency: Any  # float32 [M], 0 is off: subtracted as often as a token was sampled before
  bias_ids: Any  # int32 [M, B], -1 where unused
  bias: Any  # float32 [M, B]


class TokenCounts(NamedTuple):
  """What each row has seen."""

  prompt: jax.Array  # bool [V, M], in its prompt
  sampled: jax.Array  # int16 [V, M], how often it was sampled


def no_controls(rows: int, max_logit_bias: int) -> LogitControls:
  """Controls that change nothing."""
  return LogitControls(
    min_tokens=jnp.zeros((rows,), jnp.int32),
    repetition=jnp.ones((rows,), jnp.float32),
    presence=jnp.zeros((rows,), jnp.float32),
    frequency=jnp.zeros((rows,), jnp.float32),
    bias_ids=jnp.full((rows, max_logit_bias), -1, jnp.int32),
    bias=jnp.zeros((rows, max_logit_bias), jnp.float32),
  )


def no_counts(vocab_size: int, rows: int) -> TokenCounts:
  """Nothing seen."""
  shape = (vocab_size, rows)
  return TokenCounts(jnp.zeros(shape, jnp.bool_), jnp.zeros(shape, jnp.int16))


def are_on(controls: LogitControls) -> jax.Array:
  """Which rows, bool [M], have controls that change anything."""
  return (
    (controls.min_tokens > 0)
    | (controls.repetition != 1)
    | (controls.presence != 0)
    | (controls.frequency != 0)
    | jnp.any(controls.bias_ids >= 0, axis=1)
  )


def adjust(
  logits: jax.Array,
  controls: LogitControls,
  counts: TokenCounts,
  *,
  count: jax.Array,
  stop_ids: jax.Array,
) -> jax.Array:
  """Logits float32 [V, M] after the controls.

  Args:
    logits: float32 [V, M].
    controls: of the M rows.
    counts: of the M rows.
    count: int32 [M], suffix tokens that each row has.
    stop_ids: int32 [M, S], -1 where unused.
  """
  rows = jnp.arange(logits.shape[1], dtype=jnp.int32)[:, None]
  absent = logits.shape[0]  # out of range: dropped
  ids = jnp.where(controls.bias_ids < 0, absent, controls.bias_ids)
  logits = logits.at[ids, rows].add(controls.bias, mode='drop')
  early = (count < controls.min_tokens)[:, None] & (stop_ids >= 0)
  logits = logits.at[jnp.where(early, stop_ids, absent), rows].set(-jnp.inf, mode='drop')
  sampled = counts.sampled.astype(jnp.float32)
  seen = counts.prompt | (counts.sampled > 0)
  penalised = jnp.where(
    logits > 0, logits / controls.repetition[None], logits * controls.repetition[None]
  )
  logits = jnp.where(seen, penalised, logits)
  logits = logits - controls.frequency[None] * sampled
  return logits - jnp.where(counts.sampled > 0, controls.presence[None], 0.0)


def count_token(counts: TokenCounts, token: jax.Array, who: jax.Array) -> TokenCounts:
  """Counts the int32 token [M] that rows `who` [M] took."""
  rows = jnp.arange(token.shape[0], dtype=jnp.int32)
  return counts._replace(sampled=counts.sampled.at[token, rows].add(who.astype(jnp.int16)))


def start_counts(
  counts: TokenCounts, tokens: jax.Array, length: jax.Array, prompt_length: jax.Array, who: Any
) -> TokenCounts:
  """Rows `who` [M] begin with int32 tokens [M, P], `length` [M] of them; those past prompt_length [M] were sampled."""
  place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
  absent = counts.prompt.shape[0]

  def ids(here: jax.Array) -> jax.Array:
    return jnp.where(here & who[:, None], tokens, absent)

  in_prompt = ids(place < prompt_length[:, None])
  sampled = ids((place >= prompt_length[:, None]) & (place < length[:, None]))
  return TokenCounts(
    jnp.where(who[None], False, counts.prompt).at[in_prompt, rows].set(True, mode='drop'),
    jnp.where(who[None], 0, counts.sampled).astype(jnp.int16).at[sampled, rows].add(1, mode='drop'),
  )
