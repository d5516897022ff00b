"""What the boxes on the device read and give: arrays with one value per trained token.

Not for the host side (`reward_batch.py`). Invariant: what reaches a box is clean: every masked
place holds 0 (ids: -1), so no box has to think of NaN; sums still need the mask.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.objectives.aggregation import Mean


class LossInputs(NamedTuple):
  """One value per token, all of one shape: [rows, N] in a loss, [M, rows, N] before micro-batches.

  The tokens of a trajectory lie in one row, in order; those of a group may lie in several rows and
  micro-batches. With kept sets all log-probs are of policies restricted to them. Only `log_probs_t`,
  `entropy_t` and `vocabulary` carry a gradient.
  """

  log_probs_t: jax.Array  # float32, current policy
  entropy_t: jax.Array  # float32, of the current policy's whole distribution, kept sets or not
  proximal_log_probs_t: jax.Array  # float32, weights at the start of the batch
  behaviour_log_probs_t: jax.Array  # float32, as sampled
  anchor_log_probs_t: jax.Array  # float32, starting weights; 0 where no box is tagged 'anchor'
  adv_t: jax.Array  # float32; for critic estimators the reward due at the token
  reward_t: jax.Array  # float32, the trajectory's reward after shaping
  mask_t: jax.Array  # bool, True where trained on
  weight_t: jax.Array  # float32, the aggregation's weight
  trajectory_t: jax.Array  # int32, index in the batch
  group_t: jax.Array  # int32, index in the batch
  turn_t: jax.Array  # int32, index in the trajectory
  version_t: jax.Array  # int32, weights version that sampled the token
  staleness_t: jax.Array  # int32, learner version - version_t
  vocabulary: Mapping[
    str, Any
  ] = {}  # by slot, what the hooks of whole distributions gave: [..., N, ...]
  teacher_log_probs_t: Any = None  # float32, of config.learner.teacher; None without one
  # Of a critic at the start of the batch; None without one:
  value_t: Any = None  # float32, of the state before the token
  next_value_t: Any = None  # float32, of the state after it, see PackedBatch


class TokenLoss(NamedTuple):
  """What a trust region gives: a loss per token, and where its bounds took the gradient away."""

  loss_t: jax.Array  # float32
  clipped_low_t: jax.Array  # bool
  clipped_high_t: jax.Array  # bool
  metrics: Mapping[str, jax.Array] = {}  # name to per-token values, averaged over trained tokens


class Correction(NamedTuple):
  """What a correction gives: a weight per token, held constant.

  A token that is not kept has weight 0 and stays in every denominator.
  """

  weight_t: jax.Array  # float32
  kept_t: jax.Array  # bool
  truncated_t: jax.Array  # bool, where a bound took something away from the weight


class Penalty(NamedTuple):
  """What a regulariser gives: a term of the loss with a denominator of its own."""

  loss_t: jax.Array  # float32, the coefficient included
  denominator: jax.Array | None = None  # float32 scalar of the whole batch; None: trained tokens
  metrics: Mapping[str, jax.Array] = {}  # name to per-token values, averaged over trained tokens


class Statistics(NamedTuple):
  """What `batch_statistics` gives: arrays per token, cut with the micro-batches, and scalars.

  `step_scale` is a float32 factor of the optimizer's update, as a learning rate is.
  """

  tokens: Mapping[str, jax.Array] = {}  # [M, rows, N]
  scalars: Mapping[str, jax.Array] = {}
  step_scale: jax.Array | None = None


class Denominators(NamedTuple):
  """Global denominators, float32 scalars: of the policy loss, and the number of trained tokens."""

  policy: jax.Array
  tokens: jax.Array


class LossParts(NamedTuple):
  """The share of a micro-batch in the loss and its metrics; `added` joins two of them."""

  loss: jax.Array
  means: dict[str, Mean]
  maxima: dict[str, jax.Array]  # 0 or more
  histograms: dict[str, jax.Array]  # float32 counts


def clean(inputs: LossInputs) -> LossInputs:
  """`inputs` in float32 with 0 (ids: -1) wherever the mask is off, in value and in gradient."""
  mask = inputs.mask_t

  def masked(value: jax.Array | None) -> Any:
    if value is None:
      return None
    kept = mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))
    if jnp.issubdtype(value.dtype, jnp.integer):
      return jnp.where(kept, value, -1)
    return jnp.where(kept, value.astype(jnp.float32), 0.0)

  return jax.tree.map(masked, inputs._replace(mask_t=None))._replace(mask_t=mask)


def added(first: LossParts, second: LossParts) -> LossParts:
  """The parts of two pieces of a batch as one."""
  total: Any = jax.tree.map(jnp.add, first, second)
  maxima = jax.tree.map(jnp.maximum, first.maxima, second.maxima)
  return total._replace(maxima=maxima)
