"""How much attention each token of a text gets from the tokens well after it: what later thought leans on.

For branch points of trees (strategies/). The model runs over the whole text, padded as in prompt_scoring.py, and the
columns of the softmax are summed block by block of queries. Invariant: no array is larger than the scores of one block.
"""

import jax
import jax.numpy as jnp

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.prefill import attention_blocks, attention_rule, causal_attention
from rlax_stack.rollout.serving import ServingParams


def attention_received(
  config: ModelConfig,
  engine: EngineConfig,
  params: ServingParams,
  padded_tokens: jax.Array,
  true_length: jax.Array,
  distance: jax.Array,
) -> jax.Array:
  """Attention that tokens of int32 texts [B, P] get, averaged over layers and heads, float32 [B, P].

  rⱼ = mean over layers l and heads h of Σᵢ αˡʰᵢⱼ over j + distance ≤ i < T, α the softmax weights of query i.

  Args:
    config: shape of the model.
    engine: static sizes.
    params: of the model.
    padded_tokens: the texts.
    true_length: int32 [B], T of each; padding pays no attention and gets none.
    distance: int32 [], from 0.
  """
  batch, length = padded_tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, sees_all: jax.Array | None = None):
    rule = attention_rule(config, sees_all)
    received = jnp.zeros((batch, length), jnp.float32)
    for start, end, weights in attention_blocks(q, k, rule):
      queries = positions[:, start:end, None]
      counts = (queries - positions[:, None, :end] >= distance) & (
        queries < true_length[:, None, None]
      )
      mass = jnp.where(counts[:, None, None], weights, 0.0).sum((1, 2, 3))
      received = received.at[:, :end].add(mass / config.num_heads)
    return causal_attention(q, k, v, rule), received

  _, received = decoder.hidden_states_and_aux(
    params.model, config, padded_tokens, positions, attend, compute_dtype=engine.compute_dtype
  )
  return received.mean(0)
