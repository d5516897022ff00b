"""DMPO: the answers of a group are to be as likely, among each other, as their rewards say.

Not for tokens' distributions. Invariant: what a group says is of the whole batch under the current
weights, so it does not depend on rows and micro-batches.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from rlax_stack.objectives import segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Penalty, Statistics


def distribution_matching(
  inputs: LossInputs, *, statistics: Statistics, coef: Annotated[float, Range(0.0)] = 2.0
) -> Penalty:
  """Squared distance of the group's distribution over its answers from that of its rewards.

  L = λ (1/#groups) Σ_g (1/G) Σ_{i ∈ g} (pᵢ − qᵢ)²,  p = softmax(R/α) and q = softmax(φ) over the group
  φᵢ = (1/nᵢ) Σₜ log πₜ

  Divided by: the answers of each group, then the groups. Gradient flows through: log_probs_t of all
  answers of the group; the slopes are those of the whole batch under the weights that scored it.
  See "Beyond Mode Collapse: Distribution Matching for Diverse Reasoning", Li et al.
  (https://arxiv.org/abs/2605.19461), DMPO. The defaults are those that public code of it takes for the
  paper's.

  Args:
    inputs: [rows, N].
    statistics: from `group_distances`.
    coef: λ.
    temperature: α.
  """
  moved = inputs.log_probs_t - jax.lax.stop_gradient(inputs.log_probs_t)
  loss_t = statistics.tokens['loss'] + statistics.tokens['slope'] * moved
  return Penalty(coef * loss_t, jnp.float32(1.0))


def group_distances(
  inputs: LossInputs, *, temperature: Annotated[float, Range(1e-3)] = 1.0 / 15.0
) -> Statistics:
  """The distance of every group and how it changes with the log-prob of each token.

  Args:
    inputs: [M, rows, N], under the current weights.
    temperature: α.

  Returns: tokens 'loss', each answer's share at its first token, and 'slope'.
  """
  mask, group = inputs.mask_t, inputs.group_t
  start = segments.run_start(mask, inputs.trajectory_t)
  length = jnp.maximum(segments.run_size(mask, inputs.trajectory_t), 1.0)
  score = segments.run_mean(inputs.log_probs_t, mask, inputs.trajectory_t)

  def over_group(value):
    return segments.batch_sum(jnp.where(start, value, 0.0), mask, group)

  target = _softmax(inputs.reward_t / temperature, inputs, start)
  policy = _softmax(score, inputs, start)
  size = jnp.maximum(over_group(jnp.ones_like(score)), 1.0)
  groups = jnp.maximum(jnp.sum(jnp.where(start, 1.0 / size, 0.0)), 1.0)
  gap = target - policy
  # ∂qⱼ/∂φᵢ = qᵢ (1[i = j] − qⱼ)
  slope = -2.0 * policy * (gap - over_group(gap * policy)) / (size * groups)
  loss = jnp.where(start, gap * gap / (size * groups), 0.0)
  return Statistics(tokens={'loss': loss, 'slope': jnp.where(mask, slope / length, 0.0)})


def _softmax(value_t: jax.Array, inputs: LossInputs, start: jax.Array) -> jax.Array:
  """Softmax over the answers of each group of a value that is the same at all tokens of an answer."""
  ids = jnp.where(inputs.mask_t, inputs.group_t, 0)
  flat = jnp.where(start, value_t, -jnp.inf).reshape(-1)
  largest = jax.ops.segment_max(flat, ids.reshape(-1), num_segments=flat.size)
  top = jnp.where(inputs.mask_t, largest[ids], 0.0)
  weight = jnp.where(inputs.mask_t, jnp.exp(jnp.where(inputs.mask_t, value_t - top, 0.0)), 0.0)
  total = segments.batch_sum(jnp.where(start, weight, 0.0), inputs.mask_t, inputs.group_t)
  return weight / jnp.where(total > 0.0, total, 1.0)


TABLE = {
  'distribution_matching': Box(
    distribution_matching,
    formula='+ {coef:g}·E_g(softmax(R/{temperature:g}) − softmax(E log π))²',
    tags=frozenset({'group'}),
    batch_statistics=group_distances,
  )
}
