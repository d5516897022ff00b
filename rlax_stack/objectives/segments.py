"""Sums over the tokens of a trajectory, a turn or a group, spread back over those tokens.

Not for means over a batch. Invariant: runs (trajectories, turns) lie in one row, so their sums need
no other row; groups need the whole batch.
"""

import jax
import jax.numpy as jnp


def run_sum(value_t: jax.Array, mask_t: jax.Array, *ids: jax.Array) -> jax.Array:
  """At every token the sum over its run: the neighbours in its row with equal `ids`.

  Args:
    value_t: float32 [..., N]; what is masked is not counted.
    mask_t: bool, the same shape.
    *ids: int, the same shape: `trajectory_t`, or `trajectory_t` and `turn_t`.

  Returns: float32, the same shape, 0 where masked. Differentiable in `value_t`.
  """
  size = value_t.shape[-1]
  run = jnp.cumsum(_changed(mask_t, ids).astype(jnp.int32), axis=-1).reshape(-1, size)
  value = jnp.where(mask_t, value_t, 0.0).reshape(-1, size)

  def one_row(value, run):
    return jax.ops.segment_sum(value, run, num_segments=size)[run]

  return jnp.where(mask_t, jax.vmap(one_row)(value, run).reshape(value_t.shape), 0.0)


def run_mean(value_t: jax.Array, mask_t: jax.Array, *ids: jax.Array) -> jax.Array:
  """At every token the mean over the trained tokens of its run; see `run_sum`."""
  return run_sum(value_t, mask_t, *ids) / jnp.maximum(run_size(mask_t, *ids), 1.0)


def run_size(mask_t: jax.Array, *ids: jax.Array) -> jax.Array:
  """At every token the number of trained tokens of its run, float32; see `run_sum`."""
  return run_sum(mask_t.astype(jnp.float32), mask_t, *ids)


def run_start(mask_t: jax.Array, *ids: jax.Array) -> jax.Array:
  """True at the first trained token of every run: their number is the number of runs."""
  changed = _changed(mask_t, ids)
  first_of_row = jnp.cumsum(mask_t.astype(jnp.int32), axis=-1) == 1
  return mask_t & (changed | first_of_row)


def run_end(mask_t: jax.Array, *ids: jax.Array) -> jax.Array:
  """True at the last trained token of every run; see `run_start`."""
  backwards = [jnp.flip(x, axis=-1) for x in (mask_t, *ids)]
  return jnp.flip(run_start(*backwards), axis=-1)


def batch_sum(value_t: jax.Array, mask_t: jax.Array, ids: jax.Array) -> jax.Array:
  """At every token the sum over all tokens of the batch with the same id (a group, a trajectory).

  Only before micro-batches are cut. `ids` are in [0, number of tokens) where the mask is on.
  """
  flat = jnp.where(mask_t, ids, 0).reshape(-1)
  value = jnp.where(mask_t, value_t, 0.0).reshape(-1)
  sums = jax.ops.segment_sum(value, flat, num_segments=flat.size)
  return jnp.where(mask_t, sums[flat].reshape(value_t.shape), 0.0)


def _changed(mask_t: jax.Array, ids: tuple[jax.Array, ...]) -> jax.Array:
  """True where the ids differ from those of the trained token before; masked ids are not read."""
  places = jnp.broadcast_to(jnp.arange(mask_t.shape[-1], dtype=jnp.int32), mask_t.shape)
  latest = jax.lax.cummax(jnp.where(mask_t, places, 0), axis=mask_t.ndim - 1)
  changed = jnp.zeros(mask_t.shape, bool)
  for x in ids:
    filled = jnp.take_along_axis(x, latest, axis=-1)
    changed = changed | (jnp.diff(filled, axis=-1, prepend=filled[..., :1]) != 0)
  return changed
