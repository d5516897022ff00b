"""Prompt processing: the model over padded prompts, keeping each layer's keys and values and the last logits.

Uses the decoder of models/ as it stands (scanned layers, one row per prompt). Attention is causal in blocks of queries,
so that no score array grows with the square of a long prompt. Padding comes after the prompt and is seen by nobody.
A long prefix comes in pieces of a fixed length: what a piece becomes does not depend on which pieces were stored before
it was asked for, so reuse of stored ones changes no bit.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.experts import Routing
from rlax_stack.pallas_kernels.shared_prefix_decode import NO_WINDOW
from rlax_stack.rollout.engine_state import EngineConfig, Prefix
from rlax_stack.rollout.quantise import KVTable, read_table
from rlax_stack.rollout.serving import ServingParams

_QUERY_BLOCK = 256
_NEGATIVE = -1e30
_LEAST_ROWS = 4


class AttentionRule(NamedTuple):
  """How the tokens of one layer see each other."""

  window: Any = None  # int, or int32 [] where layers differ; None sees all
  scale: float | None = None  # of the scores; None is Dh ** -0.5
  soft_cap: float | None = None  # scores become cap * tanh(score / cap)

  def seen(self, ages: jax.Array) -> jax.Array:
    """Whether a query sees a key `ages` (int32) positions back, bool of the same shape."""
    return ages >= 0 if self.window is None else (ages >= 0) & (ages < self.window)

  def scaled(self, q: jax.Array) -> jax.Array:
    """Queries [..., Dh] times the scale, in their dtype."""
    scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
    return (q.astype(jnp.float32) * scale).astype(q.dtype)

  def capped(self, scores: jax.Array) -> jax.Array:
    """Scores float32, with the cap."""
    return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)


CAUSAL = AttentionRule()  # sees all before it


def attention_rule(config: ModelConfig, sees_all: jax.Array | None = None) -> AttentionRule:
  """Of a layer of the model; `sees_all`, bool [], is what the decoder says of it where layers differ."""
  window: Any = config.sliding_window
  if sees_all is not None:
    window = jnp.where(sees_all, NO_WINDOW, window)
  return AttentionRule(window, config.attention_scale, config.attention_soft_cap)


def attention_blocks(
  q: jax.Array, k: jax.Array, rule: AttentionRule = CAUSAL
) -> Iterator[tuple[int, int, jax.Array]]:
  """Causal softmax weights of q [B, T, H, Dh] over k [B, T, K, Dh], block after block of queries.

  Yields: (start, end, float32 [B, K, H / K, end - start, end]), of queries from start to end over the keys before end.
  """
  batch, length, heads, dim = q.shape
  kv = k.shape[2]
  grouped = rule.scaled(q).reshape(batch, length, kv, heads // kv, dim).transpose(0, 2, 3, 1, 4)
  keys = k.transpose(0, 2, 1, 3)
  for start in range(0, length, _QUERY_BLOCK):
    end = min(start + _QUERY_BLOCK, length)
    scores = jnp.einsum(
      'bkrtd,bksd->bkrts',
      grouped[:, :, :, start:end],
      keys[:, :, :end],
      preferred_element_type=jnp.float32,
    )
    seen = rule.seen(jnp.arange(start, end)[:, None] - jnp.arange(end)[None, :])
    scores = jnp.where(seen[None, None, None], rule.capped(scores), _NEGATIVE)
    yield start, end, jax.nn.softmax(scores, axis=-1)


def causal_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, rule: AttentionRule = CAUSAL
) -> jax.Array:
  """Causal attention of q [B, T, H, Dh] over k, v [B, T, K, Dh] -> [B, T, H, Dh]; softmax in float32."""
  values = v.transpose(0, 2, 1, 3)
  outputs = [
    jnp.einsum(
      'bkrts,bksd->bkrtd',
      weights.astype(v.dtype),
      values[:, :, :end],
      preferred_element_type=jnp.float32,
    ).astype(q.dtype)
    for _, end, weights in attention_blocks(q, k, rule)
  ]
  joined = jnp.concatenate(outputs, axis=3)
  return joined.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def prefill(
  config: ModelConfig,
  engine: EngineConfig,
  params: ServingParams,
  padded_tokens: jax.Array,
  true_length: jax.Array,
) -> Prefix:
  """Runs int32 prompts [B, P] of true_length [B] tokens."""
  batch, length = padded_tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, sees_all: jax.Array | None = None):
    return causal_attention(q, k, v, attention_rule(config, sees_all)), (k, v)

  hidden, aux = decoder.hidden_states_and_aux(
    params.model,
    config,
    padded_tokens,
    positions,
    attend,
    compute_dtype=engine.compute_dtype,
    observe=_experts if engine.record_experts else None,
  )
  return _made(config, engine, params, hidden, aux, true_length)


def prefill_more(
  config: ModelConfig,
  engine: EngineConfig,
  params: ServingParams,
  prefix_k: KVTable,
  prefix_v: KVTable,
  padded_tokens: jax.Array,
  true_length: jax.Array,
  pages: jax.Array,
  context: jax.Array,
) -> Prefix:
  """Runs the next pieces int32 [B, C] of prefixes whose `context` [B] tokens before lie in `pages` [B, N].

  Whole pages of the context pass one after another through a float32 online softmax, from the first that anyone sees to
  the end of the longest context.
  """
  batch, length = padded_tokens.shape
  positions = context[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
  size = engine.page_size
  token = jnp.arange(size, dtype=jnp.int32)

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, *, sees_all: Any = None):
    rule = attention_rule(config, sees_all)
    kv, ratio = k.shape[2], q.shape[2] // k.shape[2]
    queries = rule.scaled(q).reshape(batch, length, kv, ratio, -1).transpose(0, 2, 3, 1, 4)

    def absorb_page(i: jax.Array, state: _Softmax) -> _Softmax:
      at = (layer, pages[:, i])
      keys, values = (read_table(table, at, q.dtype) for table in (prefix_k, prefix_v))
      place = i * size + token
      seen = (place[None] < context[:, None])[:, None, :]
      if rule.window is not None:
        seen = seen & (positions[:, :, None] - place[None, None, :] < rule.window)
      seen = jnp.broadcast_to(seen, (batch, length, size))
      return _absorb(rule, state, queries, keys, values, seen)

    first = 0  # page that somebody sees
    if rule.window is not None:
      first = jnp.maximum(jnp.min(context) + 1 - rule.window, 0) // size
    state = _empty(queries)
    state = jax.lax.fori_loop(first, jnp.max(context) // size, absorb_page, state)
    seen = rule.seen(jnp.arange(length)[:, None] - jnp.arange(length)[None, :])
    seen = jnp.broadcast_to(seen[None], (batch, length, length))
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    state = _absorb(rule, state, queries, keys, values, seen)
    out = (state.values / state.total[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape), (k, v)

  hidden, aux = decoder.hidden_states_and_aux(
    params.model,
    config,
    padded_tokens,
    positions,
    attend,
    compute_dtype=engine.compute_dtype,
    of_layers=jnp.arange(config.num_layers, dtype=jnp.int32),
    observe=_experts if engine.record_experts else None,
  )
  return _made(config, engine, params, hidden, aux, true_length)


def _experts(routing: Routing) -> jax.Array:
  return routing.experts.astype(jnp.int16)


def _made(
  config: ModelConfig,
  engine: EngineConfig,
  params: ServingParams,
  hidden: jax.Array,
  aux: Any,
  true_length: jax.Array,
) -> Prefix:
  """The prefix of what the decoder gave."""
  (k, v), experts = aux if engine.record_experts else (aux, None)
  return Prefix(k, v, _last_logits(config, params, hidden, true_length), experts)


class _Softmax(NamedTuple):
  """Running softmax, float32: largest score and sum [B, K, R, T], weighted values [B, K, R, T, Dh]."""

  largest: jax.Array
  total: jax.Array
  values: jax.Array


def _empty(queries: jax.Array) -> _Softmax:
  shape = queries.shape[:-1]
  return _Softmax(
    jnp.full(shape, _NEGATIVE, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros(queries.shape, jnp.float32),
  )


def _absorb(
  rule: AttentionRule,
  state: _Softmax,
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  seen: jax.Array,
) -> _Softmax:
  """Adds keys and values [B, K, S, Dh], seen bool [B, T, S], to the softmax of queries [B, K, R, T, Dh]."""
  scores = jnp.einsum('bkrtd,bksd->bkrts', queries, keys, preferred_element_type=jnp.float32)
  seen = seen[:, None, None]
  scores = jnp.where(seen, rule.capped(scores), _NEGATIVE)
  largest = jnp.maximum(state.largest, scores.max(-1))
  # Where nothing was seen yet, largest is as low as the scores: their weights must be 0, not 1.
  weights = jnp.where(seen, jnp.exp(scores - largest[..., None]), 0.0)
  keep = jnp.exp(state.largest - largest)
  weighted = jnp.einsum(
    'bkrts,bksd->bkrtd', weights.astype(values.dtype), values, preferred_element_type=jnp.float32
  )
  return _Softmax(
    largest, state.total * keep + weights.sum(-1), state.values * keep[..., None] + weighted
  )


def _last_logits(
  config: ModelConfig, params: ServingParams, hidden: jax.Array, true_length: jax.Array
) -> jax.Array:
  """Logits float32 [B, V] at the last of true_length [B] tokens of hidden [B, T, D]."""
  batch = hidden.shape[0]
  last = jnp.take_along_axis(hidden, (true_length - 1)[:, None, None], axis=1)[:, 0]
  # A single row would take another matmul, with other rounding: a prompt's logits must not depend on its batch.
  last = jnp.pad(last, ((0, max(0, _LEAST_ROWS - batch)), (0, 0)))
  logits = jax.lax.dot_general(
    last,
    decoder.lm_head(params.model, config),
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  return decoder.capped(config, logits[:batch])
