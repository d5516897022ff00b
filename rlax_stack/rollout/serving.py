"""The decoder in serving form: fused per-layer weights, and activations with one column per token.

Decode multiplies few tokens by large matrices. On the CPU `W [out, in] @ x [in, M]` is two to three times quicker than
`x [M, in] @ Wᵀ` for small M, and a column's result does not depend on where it stands; hence hidden states are [D, M]
here. The same formulas as models/decoder.py, which stays the reference (a test compares the two).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.rope import rope_inverse_frequencies


class ServingParams(NamedTuple):
  """What every engine call takes: the model's own tree for prefill and the fused layers for decode."""

  model: decoder.Params  # the tree of models/decoder.py, in the compute dtype
  layers: tuple[decoder.Params, ...]  # one fused dict per layer


def fuse_layer(stacked: decoder.Params, index: jax.Array, *, dtype: Any) -> decoder.Params:
  """Layer `index` of the stacked layers [L, ...] in `dtype`, with q, k, v and gate, up joined."""
  layer = jax.tree.map(lambda x: x[index].astype(dtype), stacked)

  def join(*names: str) -> decoder.Params:
    parts = [layer.pop(name) for name in names]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, 0), *parts)

  layer['qkv_proj'] = join('q_proj', 'k_proj', 'v_proj')
  layer['gate_up_proj'] = join('gate_proj', 'up_proj')
  return layer


def column_rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sine and cosine, float32 [1, Dh // 2, M], of int32 positions [M]."""
  frequencies = rope_inverse_frequencies(config).reshape(-1, 1)
  angles = frequencies * positions.astype(jnp.float32)[None, :]
  return jnp.sin(angles)[None], jnp.cos(angles)[None]


def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Half-rotation of x [heads, Dh, M]."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
  turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)
  return turned.astype(x.dtype)


def _norm(scale: jax.Array, x: jax.Array, epsilon: float) -> jax.Array:
  """RMS norm over the second axis from the end, x [..., D, M]."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -2, keepdims=True) + epsilon)
  shape = (1,) * (x.ndim - 2) + (-1, 1)
  return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype).reshape(shape)


def project_qkv(
  layer: decoder.Params, config: ModelConfig, x: jax.Array, sin: jax.Array, cos: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """x [D, M] -> q [M, H, Dh], k and v [M, K, Dh]; normed, projected and rotated."""
  y = layer['qkv_proj']['kernel'] @ _norm(layer['attn_norm']['scale'], x, config.rms_norm_eps)
  if config.attention_bias:
    y = y + layer['qkv_proj']['bias'].astype(y.dtype)[:, None]
  y = y.reshape(-1, config.head_dim, x.shape[1])
  heads, kv = config.num_heads, config.num_kv_heads
  q, k, v = jnp.split(y, (heads, heads + kv), axis=0)
  if config.qk_norm:
    q = _norm(layer['q_norm']['scale'], q, config.rms_norm_eps)
    k = _norm(layer['k_norm']['scale'], k, config.rms_norm_eps)
  rows = (_rotate(q, sin, cos), _rotate(k, sin, cos), v)
  return tuple(z.transpose(2, 0, 1) for z in rows)


def finish_layer(
  layer: decoder.Params, config: ModelConfig, x: jax.Array, attended: jax.Array
) -> jax.Array:
  """Adds attention's output [M, H, Dh] and the MLP to x [D, M]."""
  x = x + layer['o_proj']['kernel'] @ attended.reshape(x.shape[1], -1).astype(x.dtype).T
  normed = _norm(layer['mlp_norm']['scale'], x, config.rms_norm_eps)
  gate, up = jnp.split(layer['gate_up_proj']['kernel'] @ normed, 2, axis=0)
  return x + layer['down_proj']['kernel'] @ (jax.nn.silu(gate) * up)


def logits_of(params: ServingParams, config: ModelConfig, x: jax.Array) -> jax.Array:
  """Hidden states x [D, M] before the final norm -> logits float32 [V, M]."""
  normed = _norm(params.model['final_norm']['scale'], x, config.rms_norm_eps)
  return jnp.matmul(
    decoder.lm_head(params.model, config), normed, preferred_element_type=jnp.float32
  )
