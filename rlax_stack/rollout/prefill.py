"""Prompt processing: the model over padded prompts, keeping each layer's keys and values and the last logits.

Uses the decoder of models/ as it stands (scanned layers, one row per prompt). Attention is causal in blocks of queries,
so that no score array grows with the square of a long prompt. Padding comes after the prompt and is seen by nobody.
"""

import jax
import jax.numpy as jnp

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.rollout.engine_state import EngineConfig, Prefix
from rlax_stack.rollout.serving import ServingParams

_QUERY_BLOCK = 256
_NEGATIVE = -1e30
_LEAST_ROWS = 4


def causal_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None = None
) -> jax.Array:
  """Causal attention of q [B, T, H, Dh] over k, v [B, T, K, Dh] -> [B, T, H, Dh]; softmax in float32."""
  batch, length, heads, dim = q.shape
  kv = k.shape[2]
  scaled = (q.astype(jnp.float32) * dim**-0.5).astype(q.dtype)
  grouped = scaled.reshape(batch, length, kv, heads // kv, dim).transpose(0, 2, 3, 1, 4)
  keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  outputs = []
  for start in range(0, length, _QUERY_BLOCK):
    end = min(start + _QUERY_BLOCK, length)
    scores = jnp.einsum(
      'bkrtd,bksd->bkrts',
      grouped[:, :, :, start:end],
      keys[:, :, :end],
      preferred_element_type=jnp.float32,
    )
    ages = jnp.arange(start, end)[:, None] - jnp.arange(end)[None, :]
    seen = ages >= 0 if window is None else (ages >= 0) & (ages < window)
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, _NEGATIVE), axis=-1)
    outputs.append(
      jnp.einsum(
        'bkrts,bksd->bkrtd',
        weights.astype(v.dtype),
        values[:, :, :end],
        preferred_element_type=jnp.float32,
      ).astype(q.dtype)
    )
  joined = jnp.concatenate(outputs, axis=3)
  return joined.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


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

  def attend(q: jax.Array, k: jax.Array, v: jax.Array):
    return causal_attention(q, k, v, window=config.sliding_window), (k, v)

  hidden, (k, v) = decoder.hidden_states_and_aux(
    params.model, config, padded_tokens, positions, attend, compute_dtype=engine.compute_dtype
  )
  last = jnp.take_along_axis(hidden, (true_length - 1)[:, None, None], axis=1)[:, 0]
  # A single row would take another matmul, with other rounding: a prompt's logits must not depend on its batch.
  last = jnp.pad(last, ((0, max(0, _LEAST_ROWS - batch)), (0, 0)))
  logits = jax.lax.dot_general(
    last,
    decoder.lm_head(params.model, config),
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  return Prefix(k, v, logits[:batch])
