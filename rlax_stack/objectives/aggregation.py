"""Means as (numerator, denominator) pairs, so that micro-batches, rows and hosts sum first and
divide once.

Not for choosing what is averaged: that is the mask. Invariant: the sum of the weights of
`token_weights` over the global batch is the denominator of every mean made with them, whatever the
rows and micro-batches are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.errors import ConfigError

AGGREGATIONS = ('token_mean', 'sequence_mean')


class Mean(NamedTuple):
  """An unfinished mean. Both fields are float32 scalars; sum them over parts of a batch.

  Then divide once.
  """

  numerator: jax.Array
  denominator: jax.Array


def masked_mean(value_t: jax.Array, mask_t: jax.Array) -> Mean:
  """Sum of `value_t` over the tokens of `mask_t` and their number, both float32.

  Args:
    value_t: any shape; values outside the mask may be NaN, they take no part in value or gradient.
    mask_t: bool, the same shape.
  """
  value_t = jnp.where(mask_t, value_t.astype(jnp.float32), 0.0)
  return Mean(jnp.sum(value_t), jnp.sum(mask_t.astype(jnp.float32)))


def weighted_mean(value_t: jax.Array, weight_t: jax.Array) -> Mean:
  """Sum of weight times value and sum of the weights, both float32; a weight of 0 hides even a NaN.

  Args:
    value_t: any shape.
    weight_t: float32, the same shape, from `token_weights`.
  """
  value_t = jnp.where(weight_t > 0, value_t.astype(jnp.float32), 0.0)
  return Mean(jnp.sum(weight_t * value_t), jnp.sum(weight_t))


def token_weights(
  mask_t: jax.Array,
  trajectory_t: jax.Array,
  *,
  aggregation: str,
  num_trajectories: int,
) -> jax.Array:
  """The weight of every token in the policy loss, float32, the shape of `mask_t`.

  token_mean:    wₜ = mₜ           Σ w = N, the trained tokens ("DAPO", Yu et al.,
    arxiv.org/abs/2503.14476)
  sequence_mean: wₜ = mₜ / n_i     Σ w = B, the trajectories with n_i > 0 ("DeepSeekMath",
    arxiv.org/abs/2402.03300)

  Divided by: Σ w over the global batch (by the caller). Call it on the whole batch, before
  micro-batches are
  cut: n_i counts the tokens of trajectory i wherever its rows lie. No gradient flows.

  Args:
    mask_t: bool, True where trained on.
    trajectory_t: int32, the same shape, index of the trajectory in the batch, -1 in padding.
    aggregation: one of AGGREGATIONS.
    num_trajectories: static upper bound of `trajectory_t` + 1.

  Raises:
    ConfigError: an unknown aggregation.
  """
  mask = mask_t.astype(jnp.float32)
  if aggregation == 'token_mean':
    return mask
  if aggregation == 'sequence_mean':
    ids = jnp.where(mask_t, trajectory_t, 0).reshape(-1)
    counts = jax.ops.segment_sum(mask.reshape(-1), ids, num_segments=num_trajectories)
    return mask / jnp.maximum(counts[ids], 1.0).reshape(mask_t.shape)
  raise ConfigError(f'unknown {aggregation=}. Set it to one of {AGGREGATIONS}.')
