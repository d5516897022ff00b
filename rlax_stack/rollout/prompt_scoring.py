"""Log-probs of given texts: the model over padded sequences, every token scored by the state before it.

For prompts of an endpoint, texts of others and checks of what was sampled. Not for sampled tokens, whose log-probs come
out of the decode step. A text is padded to one of a few lengths, a page times a power of two; each is a program of its
own, compiled at its first use, because few engines score at all. Padding comes last and is seen by nobody.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.pallas_kernels.fused_log_prob import fused_log_prob
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.prefill import attention_rule, causal_attention
from rlax_stack.rollout.serving import ServingParams


class Scores(NamedTuple):
  """Of token i given the tokens before it, at temperature 1; 0 at i = 0 and in the padding."""

  log_probs: jax.Array  # float32 [B, P]
  top_ids: jax.Array | None = (
    None  # int32 [B, P, K], likeliest first; the three only where asked for
  )
  top_log_probs: jax.Array | None = None  # float32 [B, P, K]
  ranks: jax.Array | None = None  # int32 [B, P], 1 and the number of likelier tokens


def padded_length(engine: EngineConfig, length: int) -> int:
  """Tokens that a text of `length` is padded to: page_size times a power of two, at most the longest text."""
  longest = -(-engine.max_text_tokens // engine.page_size) * engine.page_size
  bucket = engine.page_size
  while bucket < length:
    bucket *= 2
  return min(bucket, longest)


def score(
  config: ModelConfig,
  engine: EngineConfig,
  params: ServingParams,
  padded_tokens: jax.Array,
  true_length: jax.Array,
  *,
  tops: bool,
) -> Scores:
  """Scores int32 texts [B, P] of true_length [B] tokens; with `tops` also the min(max_top_log_probs, V) likeliest."""
  batch, length = padded_tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  hidden = decoder.hidden_states(
    params.model,
    config,
    padded_tokens,
    positions,
    lambda q, k, v, **kind: causal_attention(q, k, v, attention_rule(config, **kind)),
    compute_dtype=engine.compute_dtype,
  )
  targets = jnp.roll(padded_tokens, -1, axis=1).reshape(-1)
  found = fused_log_prob(
    hidden.reshape(batch * length, -1),
    decoder.lm_head(params.model, config),
    targets,
    mask=(positions + 1 < true_length[:, None]).reshape(-1),
    soft_cap=config.final_soft_cap,
    top_k=min(engine.max_top_log_probs, config.vocab_size) if tops else 0,
    implementation=engine.kernels,
  )

  def of_tokens(x: jax.Array) -> jax.Array:
    """From where a token is predicted to where it stands."""
    x = x.reshape(batch, length, *x.shape[1:])
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)

  if found.top is None:
    return Scores(of_tokens(found.log_prob))
  # One number for one token: whoever compares the two asks whether the likeliest token was taken.
  same = found.top.token == targets[:, None]
  top_log_probs = jnp.where(same, found.log_prob[:, None], found.top.log_prob)
  values = (found.log_prob, found.top.token, top_log_probs, found.top.rank)
  return Scores(*map(of_tokens, values))
