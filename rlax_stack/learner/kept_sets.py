"""Log-probs of tokens within their kept sets: what top-k, top-p and min-p left them to be drawn from.

The sampler drew from the policy restricted to the kept set and renormalised. With the set as recorded, current,
proximal and anchor policies are restricted to the same tokens, so their ratios to each other and to the sampler are
those of distributions over one support. Not for finding the sets (`rollout/sampler.py`).
See "Keep Sampling Mask" in "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", DeepSeek-AI
(https://arxiv.org/abs/2512.02556).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlax_stack.objectives.vocabulary import TokenTerms


def kept_log_probs(log_policy: jax.Array, target: jax.Array, kept_ids: jax.Array) -> jax.Array:
  """log π(t) − log Σ π(v) over the kept set, of each token.

  Gradient flows through: both terms.

  Args:
    log_policy: float32 [n, V].
    target: int32 [n], each in its kept set.
    kept_ids: int32 [n, K], filled with -1; all -1 is the whole vocabulary.

  Returns: float32 [n].
  """
  inside = kept_ids >= 0
  limited = jnp.any(inside, axis=-1)
  chosen = jnp.take_along_axis(log_policy, target[:, None], axis=-1)[:, 0]
  values = jnp.take_along_axis(log_policy, jnp.where(inside, kept_ids, 0), axis=-1)
  # Of a token without a set all places count, so that its unused sum has a finite gradient.
  mass = jax.nn.logsumexp(values, axis=-1, where=inside | ~limited[:, None])
  return chosen - jnp.where(limited, mass, 0.0)


def with_kept_log_probs(
  terms: TokenTerms | None,
) -> Callable[[jax.Array, jax.Array, Any], tuple[dict[str, Any], jax.Array | None]]:
  """`terms` and `kept_log_probs` as one function of distributions, so that one pass over them serves both.

  Returns: function (log_policy [n, V], target [n], (proximal results by slot, kept_ids [n, K] or None)) -> results of
    `terms`, and the log-probs [n] or None.
  """

  def function(log_policy, target, extras):
    proximal, kept_ids = extras
    found = {} if terms is None else terms(log_policy, target, proximal)
    return found, None if kept_ids is None else kept_log_probs(log_policy, target, kept_ids)

  return function
