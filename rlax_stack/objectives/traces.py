"""Sums to go along the trained tokens of trajectories: what critic estimators are made of.

Not for estimators themselves (advantages/critic.py). Invariants: t⁺ is the next trained token of
the trajectory, whatever lies between; nothing crosses from one trajectory to the next.
"""

import jax
import jax.numpy as jnp

from rlax_stack.objectives import segments
from rlax_stack.objectives.inputs import LossInputs


def sum_to_go(
  value_t: jax.Array, decay_t: jax.Array, mask_t: jax.Array, trajectory_t: jax.Array
) -> jax.Array:
  """yₜ = xₜ + dₜ y_{t⁺} at every trained token; at the last one of a trajectory yₜ = xₜ.

  Args:
    value_t: x, float32 [..., N], one or more trajectories to a row, each in order.
    decay_t: d, float32, the same shape.
    mask_t: bool, True where trained on; nothing is read where it is off.
    trajectory_t: int32, index of the trajectory.

  Returns: y, float32, 0 where masked.
  """
  last = segments.run_end(mask_t, trajectory_t)
  value = jnp.where(mask_t, value_t, 0.0)
  # Masked places hand on what comes after them; the end of a trajectory hands on nothing.
  decay = jnp.where(mask_t, jnp.where(last, 0.0, decay_t), 1.0)

  def joined(later, earlier):
    return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

  axis = value.ndim - 1
  total, _ = jax.lax.associative_scan(joined, (value, decay), reverse=True, axis=axis)
  return jnp.where(mask_t, total, 0.0)


def next_of(value_t: jax.Array, mask_t: jax.Array, trajectory_t: jax.Array) -> jax.Array:
  """x_{t⁺} at every trained token, 0 at the last one of a trajectory; see `sum_to_go`."""
  size = mask_t.shape[-1]
  places = jnp.where(mask_t, jnp.arange(size, dtype=jnp.int32), size - 1)
  nearest = jax.lax.cummin(places, axis=mask_t.ndim - 1, reverse=True)
  following = jnp.concatenate([nearest[..., 1:], nearest[..., -1:]], axis=-1)
  last = segments.run_end(mask_t, trajectory_t)
  return jnp.where(mask_t & ~last, jnp.take_along_axis(value_t, following, axis=-1), 0.0)


def td_errors(inputs: LossInputs, gamma: float) -> jax.Array:
  """δₜ = rₜ + γ V(s_{t⁺}) − V(sₜ), float32; V is 0 after the end of a trajectory.

  rₜ is `inputs.adv_t` as the host gives it: the reward due at the token.
  """
  return inputs.adv_t + gamma * inputs.next_value_t - inputs.value_t
