"""Rotary position embedding in the half-rotation convention of Hugging Face weights.

Angles are computed in float32 from integer positions, so that a position means the same rotation in the
learner's packed rows and in the engine's decode step.
"""

import jax
import jax.numpy as jnp

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.rope import rope_inverse_frequencies


def rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sine and cosine of each position's angles: two float32 arrays [..., 1, Dh // 2] (1 = all heads)."""
  frequencies = rope_inverse_frequencies(config).reshape((1,) * positions.ndim + (-1,))
  angles = positions.astype(jnp.float32)[..., None] * frequencies
  return jnp.sin(angles)[..., None, :], jnp.cos(angles)[..., None, :]


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Rotates the feature pairs (j, j + Dh/2) of x [..., heads, Dh]; float32 inside, dtype of x kept."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
  return turned.astype(x.dtype)
