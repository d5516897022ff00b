"""The size of each trajectory's gradient, for baselines that weigh by it.

Not for the gradient of the update (`train_step.py`). Invariant: one backward pass per trajectory, and
only one gradient of the parameters alive at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlax_stack.learner.scoring import ForwardSettings, micro_batch, target_log_probs
from rlax_stack.models.adapter import model_weights
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives import segments
from rlax_stack.types import PackedBatch


def squared_gradient_norms(
  params: Any,
  config: ModelConfig,
  batch: PackedBatch,
  num_micro: jax.Array,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
  *frozen: Any,
) -> jax.Array:
  """‖∇_θ Σₜ log πₜ‖² of the trajectory of every trained token.

  Costs one forward pass of each micro-batch and one backward pass of it for every trajectory in it.

  Args:
    params: what is trained, nested dict of the model or of its adapter.
    config: shape of the model.
    batch: [M, rows, ...] rows.
    num_micro: int32 scalar; micro-batches from it on are not computed.
    settings: see ForwardSettings.
    mesh: where rows and parameters live.
    *frozen: the weights under an adapter.

  Returns: float32 [M, rows, N], the same at all tokens of a trajectory, 0 where masked.
  """

  def body(index, total):
    rows = micro_batch(batch, index)
    return total.at[index].set(_of_rows(params, config, rows, settings, mesh, frozen))

  return jax.lax.fori_loop(0, num_micro, body, jnp.zeros(batch.mask_t.shape, jnp.float32))


def _of_rows(params, config, rows, settings, mesh, frozen) -> jax.Array:
  starts = segments.run_start(rows.mask_t, rows.trajectory_t)
  # The trajectories of the rows are counted in reading order; each lies in one row.
  first = jnp.cumsum(starts.astype(jnp.int32).reshape(-1)).reshape(starts.shape)
  slot = jnp.where(rows.mask_t, first - 1, -1)

  def log_probs_of(trained):
    model = model_weights(settings.adapter, trained, *frozen)
    return target_log_probs(model, config, rows, settings, mesh).log_prob

  log_probs, pull_back = jax.vjp(log_probs_of, params)

  def one(number, norms):
    mine = slot == number
    (gradient,) = pull_back(mine.astype(log_probs.dtype))
    square = sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(gradient))
    return jnp.where(mine, square, norms)

  zeros = jnp.zeros(rows.mask_t.shape, jnp.float32)
  return jax.lax.fori_loop(0, jnp.sum(starts.astype(jnp.int32)), one, zeros)
