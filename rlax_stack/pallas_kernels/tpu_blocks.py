"""What the TPU kernels have in common: a product in float32, rows turned to columns, numbers of the softmax.

Used inside of kernels, on values in VMEM. Not for grids or block specs.
"""

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128  # of a vector register
HIDDEN = -1e30  # score of what is hidden
LOWEST = -1e29  # first running maximum: above HIDDEN, so what is wholly hidden adds nothing


def dot(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
  """Product of the last axis of `left` [n, k] and `axis` of `right`, float32; exact to it where both are float32."""
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  dims = (((1,), (axis,)), ((), ()))
  return lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)


def column(row: jax.Array) -> jax.Array:
  """[1, n] -> [n, LANES] with every lane the same: a row of lanes as a column."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T
