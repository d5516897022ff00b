"""Rotary position embedding in the half-rotation convention of Hugging Face weights.

Angles are computed in float32 from integer positions, so that a position means the same rotation in the
learner's packed rows and in the engine's decode step.
"""

import jax
import jax.numpy as jnp

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.rope import rope_inverse_frequencies


def rotation(
  config: ModelConfig, positions: jax.Array, *, local: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Sine and cosine of each position's angles: two float32 arrays [..., 1, N] (1 = all heads).

  N is rotary_dim / 2. `local` gives those of the layers with a window, see `rope_inverse_frequencies`.
  """
  frequencies = rope_inverse_frequencies(config, local=local)
  frequencies = frequencies.reshape((1,) * positions.ndim + (-1,))
  angles = positions.astype(jnp.float32)[..., None] * frequencies
  sin, cos = sine_and_cosine(config, angles, local=local)
  return sin[..., None, :], cos[..., None, :]


def sine_and_cosine(
  config: ModelConfig, angles: jax.Array, *, local: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Of float32 angles of any shape, times the attention factor where the model has one."""
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  if local or config.rope_scaling is None or config.rope_scaling.attention_factor == 1.0:
    return sin, cos
  factor = config.rope_scaling.attention_factor
  return factor * sin, factor * cos


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Rotates the feature pairs (j, j + N) of x [..., heads, Dh], j < N; float32 inside, dtype of x kept.

  Features from 2N on stay as they are (partial rotary embedding).
  """
  turning = 2 * sin.shape[-1]
  if turning < x.shape[-1]:
    turned, rest = x[..., :turning], x[..., turning:]
    return jnp.concatenate((rotate(turned, sin, cos), rest), axis=-1)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
  return turned.astype(x.dtype)
