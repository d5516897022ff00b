"""How the losses of tokens become one number: a weight per token and one global denominator.

Every mean is a (numerator, denominator) pair: micro-batches, rows and hosts sum first, and one
division by the global denominator ends it. A box sees the mask and the ids of the whole batch,
before micro-batches are cut. Invariant: the loss is Σ wₜ Lₜ / D, whatever the rows are.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.objectives import segments
from rlax_stack.objectives.boxes import Box, Range


class Mean(NamedTuple):
  """An unfinished mean. Both fields are float32 scalars; sum them over parts of a batch.

  Then divide once.
  """

  numerator: jax.Array
  denominator: jax.Array


class Weights(NamedTuple):
  """What an aggregation gives: float32 weights (0 where masked) and a float32 scalar."""

  weight_t: jax.Array
  denominator: jax.Array


def masked_mean(value_t: jax.Array, mask_t: jax.Array) -> Mean:
  """Sum of `value_t` over the tokens of `mask_t` and their number, both float32.

  Args:
    value_t: any shape; values outside the mask may be NaN, they take no part in value or gradient.
    mask_t: bool, the same shape.
  """
  value_t = jnp.where(mask_t, value_t.astype(jnp.float32), 0.0)
  return Mean(jnp.sum(value_t), jnp.sum(mask_t.astype(jnp.float32)))


def token_mean(mask_t: jax.Array, trajectory_t: jax.Array, group_t: jax.Array) -> Weights:
  """Every trained token of the batch counts the same.

  wₜ = mₜ,  D = N, the trained tokens of the batch

  See "DAPO", Yu et al. (https://arxiv.org/abs/2503.14476).

  Args:
    mask_t: bool [M, rows, N], True where trained on.
    trajectory_t: int32, the same shape, index of the trajectory in the batch.
    group_t: int32, the same shape, index of the group in the batch.
  """
  del trajectory_t, group_t
  weight = mask_t.astype(jnp.float32)
  return Weights(weight, jnp.sum(weight))


def sequence_mean(mask_t: jax.Array, trajectory_t: jax.Array, group_t: jax.Array) -> Weights:
  """Mean over trajectories of the mean over their tokens.

  wₜ = mₜ / nᵢ,  D = B, the trajectories with nᵢ > 0

  See "DeepSeekMath", Shao et al. (https://arxiv.org/abs/2402.03300). Arguments as `token_mean`.
  """
  del group_t
  size = segments.run_size(mask_t, trajectory_t)
  weight = mask_t.astype(jnp.float32) / jnp.maximum(size, 1.0)
  return Weights(weight, _trajectories(mask_t, trajectory_t))


def sequence_sum(mask_t: jax.Array, trajectory_t: jax.Array, group_t: jax.Array) -> Weights:
  """Mean over trajectories of the sum over their tokens.

  wₜ = mₜ,  D = B, the trajectories with nᵢ > 0

  See "Kimi k1.5" (https://arxiv.org/abs/2501.12599). Arguments as `token_mean`.
  """
  del group_t
  return Weights(mask_t.astype(jnp.float32), _trajectories(mask_t, trajectory_t))


def constant_norm(
  mask_t: jax.Array,
  trajectory_t: jax.Array,
  group_t: jax.Array,
  *,
  max_tokens: Annotated[int, Range(0)] = 0,
) -> Weights:
  """Sum over tokens, divided by what the longest answers would have: no bias by length.

  wₜ = mₜ,  D = B · L with L = max_tokens

  See "Understanding R1-Zero-Like Training", Liu et al. (https://arxiv.org/abs/2503.20783).

  Args:
    mask_t: see `token_mean`.
    trajectory_t: see `token_mean`.
    group_t: see `token_mean`.
    max_tokens: L; 0 takes config.rollout.max_tokens.
  """
  del group_t
  count = _trajectories(mask_t, trajectory_t)
  return Weights(mask_t.astype(jnp.float32), count * float(max(max_tokens, 1)))


def prompt_mean(mask_t: jax.Array, trajectory_t: jax.Array, group_t: jax.Array) -> Weights:
  """Mean over prompts of the mean over all tokens of a prompt's samples.

  wₜ = mₜ / n_g,  D = the prompts with n_g > 0

  See `prompt_mean` of SkyRL (https://github.com/NovaSky-AI/SkyRL). Arguments as `token_mean`.
  """
  del trajectory_t
  mask = mask_t.astype(jnp.float32)
  size = segments.batch_sum(mask, mask_t, group_t)
  ids = jnp.where(mask_t, group_t, 0).reshape(-1)
  seen = jax.ops.segment_max(mask.reshape(-1), ids, num_segments=ids.size)
  return Weights(mask / jnp.maximum(size, 1.0), jnp.sum(jnp.maximum(seen, 0.0)))


def _trajectories(mask_t: jax.Array, trajectory_t: jax.Array) -> jax.Array:
  return jnp.sum(segments.run_start(mask_t, trajectory_t).astype(jnp.float32))


TABLE = {
  'token_mean': Box(token_mean, formula='Σₜ {loss} / N'),
  'sequence_mean': Box(sequence_mean, formula='Σᵢ (1/nᵢ) Σₜ {loss} / B'),
  'sequence_sum': Box(sequence_sum, formula='Σᵢ Σₜ {loss} / B'),
  'constant_norm': Box(constant_norm, formula='Σᵢ Σₜ {loss} / (B·{max_tokens})'),
  'prompt_mean': Box(prompt_mean, formula='Σ_g (1/n_g) Σₜ {loss} / #prompts'),
}
