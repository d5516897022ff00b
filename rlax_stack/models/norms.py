"""Root-mean-square norms of every family.

Not for where they stand (`decoder.py`). Invariant: the arithmetic is float32, the dtype of the input stays.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
  """Root-mean-square norm over the last axis, float32 inside, dtype of x kept.

  With `unit_offset` the factor is 1 + scale (Gemma).
  """

  def __init__(self, size: int, epsilon: float, *, unit_offset: bool = False):
    self.scale = nnx.Param(jnp.full((size,), 0.0 if unit_offset else 1.0, jnp.float32))
    self.epsilon = epsilon
    self.unit_offset = unit_offset

  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.scale[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    return _rms_norm(x, scale, self.epsilon, self.unit_offset)


# Cheap arithmetic is done again in the backward pass, whatever `remat` says: to keep its results
# costs more time and memory than to make them.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(2, 3))
def _rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, unit_offset: bool) -> jax.Array:
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + epsilon)
  return scaled_norm(wide * inverse, scale, unit_offset=unit_offset)


def scaled_norm(normed: jax.Array, scale: jax.Array, *, unit_offset: bool) -> jax.Array:
  """float32 `normed` times the norm's scale, in the dtype of the scale; shapes that broadcast."""
  if unit_offset:
    return (normed * (1.0 + scale.astype(jnp.float32))).astype(scale.dtype)
  # Rounded before scaling, as the reference implementations do.
  return normed.astype(scale.dtype) * scale
