"""The decoder in serving form: fused per-layer kernels, and activations with one column per token.

Decode multiplies few tokens by large matrices. On the CPU `W [out, in] @ x [in, M]` is two to three times quicker than
`x [M, in] @ Wᵀ` for small M, and a column's result does not depend on where it stands; hence hidden states are [D, M]
here. Layers run in a loop, compiled once. Slicing a layer's kernel out of a stack would copy the whole model in every
step on the CPU, so there kernels are separate arrays and a switch picks the product; an accelerator reads the slice
where it lies, and holds the model once. Experts stay in their stack: only those that were chosen are taken out of it.
The formulas are those of models/decoder.py, which stays the reference (a test compares the two).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.experts import ExpertKernels, apply_mixture
from rlax_stack.models.norms import scaled_norm
from rlax_stack.models.quantised import Kernel, QuantisedKernel, columns_product
from rlax_stack.models.rope import rope_inverse_frequencies
from rlax_stack.models.rotary import sine_and_cosine


class ServingParams(NamedTuple):
  """What every engine call takes: the model's own tree for prefill and fused kernels for decode."""

  model: decoder.Params  # the tree of models/decoder.py, in the compute dtype
  # One dict per layer: qkv, o and, but for mixtures, gate_up and down, [out, in]. () where a step takes the
  # layers out of the model's tree, so that they are held once.
  kernels: tuple[dict[str, Kernel], ...]
  qkv_bias: jax.Array | None  # [L, out], where the model has one
  draft: 'ServingParams | None' = None  # a quantised copy that proposes tokens


_JOINED = {'qkv': ('q', 'k', 'v'), 'o': ('o',), 'gate_up': ('gate', 'up'), 'down': ('down',)}


def fuse_layer(stacked: decoder.Params, index: jax.Array, *, dtype: Any) -> dict[str, Kernel]:
  """Kernels of layer `index` of the stacked layers [L, ...] in `dtype`, with q, k, v and gate, up joined.

  Quantised kernels stay as they are, so that prefill and decode multiply by the same numbers.
  """

  def join(*names: str) -> Kernel:
    kernels = [stacked[f'{n}_proj']['kernel'] for n in names]
    if not isinstance(kernels[0], QuantisedKernel):
      return jnp.concatenate([kernel[index].astype(dtype) for kernel in kernels])
    return jax.tree.map(lambda *parts: jnp.concatenate([x[index] for x in parts]), *kernels)

  names = ('qkv', 'o') if 'router' in stacked else _JOINED
  return {name: join(*_JOINED[name]) for name in names}


_fuse_layer = jax.jit(fuse_layer, static_argnames='dtype')


def fuse_layers(stacked: decoder.Params, dtype: Any) -> tuple[dict[str, Kernel], ...]:
  """`fuse_layer` of every layer."""
  # One small program, run once a layer: compiling the whole conversion at once takes seconds.
  count = stacked['attn_norm']['scale'].shape[0]
  return tuple(_fuse_layer(stacked, np.int32(i), dtype=dtype) for i in range(count))


def fuse_bias(stacked: decoder.Params, dtype: Any) -> jax.Array:
  """Biases of q, k, v joined, [L, out]."""
  return jnp.concatenate([stacked[f'{n}_proj']['bias'].astype(dtype) for n in 'qkv'], axis=1)


def column_rotation(
  config: ModelConfig, positions: jax.Array, *, local: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Sine and cosine, float32 [1, rotary_dim / 2, M], of int32 positions [M]; arguments as `rotary.rotation`."""
  frequencies = rope_inverse_frequencies(config, local=local).reshape(-1, 1)
  angles = positions.astype(jnp.float32)[None, :] * frequencies
  sin, cos = sine_and_cosine(config, angles, local=local)
  return sin[None], cos[None]


def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Half-rotation of x [heads, Dh, M]; features past the rotary ones stay."""
  turning = 2 * sin.shape[1]
  if turning < x.shape[1]:
    return jnp.concatenate((_rotate(x[:, :turning], sin, cos), x[:, turning:]), axis=1)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
  turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)
  return turned.astype(x.dtype)


def _norm(config: ModelConfig, scale: jax.Array, x: jax.Array) -> jax.Array:
  """RMS norm over the second axis from the end, x [..., D, M]."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -2, keepdims=True) + config.rms_norm_eps)
  scale = scale.astype(x.dtype).reshape((1,) * (x.ndim - 2) + (-1, 1))
  return scaled_norm(wide * inverse, scale, unit_offset=config.unit_offset_norms)


def _product(params: ServingParams, name: str, layer: jax.Array, x: jax.Array) -> jax.Array:
  """Kernel `name` of a layer times x [in, M]."""
  if not params.kernels:
    stacked = params.model['layers']
    parts = [
      columns_product(jax.tree.map(lambda k: k[layer], stacked[f'{part}_proj']['kernel']), x)
      for part in _JOINED[name]
    ]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
  branches = [lambda y, w=kernels[name]: columns_product(w, y) for kernels in params.kernels]
  return jax.lax.switch(layer, branches, x)


def project_qkv(
  params: ServingParams,
  config: ModelConfig,
  layer: jax.Array,
  x: jax.Array,
  sin: jax.Array,
  cos: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """x [D, M] -> q [M, H, Dh], k and v [M, K, Dh] of int32 layer []: normed, projected and rotated."""
  stacked = params.model['layers']
  y = _product(params, 'qkv', layer, _norm(config, stacked['attn_norm']['scale'][layer], x))
  if params.qkv_bias is not None:
    y = y + params.qkv_bias[layer][:, None]
  y = y.reshape(-1, config.head_dim, x.shape[1])
  heads, kv = config.num_heads, config.num_kv_heads
  q, k, v = jnp.split(y, (heads, heads + kv), axis=0)
  if config.qk_norm:
    q = _norm(config, stacked['q_norm']['scale'][layer], q)
    k = _norm(config, stacked['k_norm']['scale'][layer], k)
  q, k, v = (z.transpose(2, 0, 1) for z in (_rotate(q, sin, cos), _rotate(k, sin, cos), v))
  return q, k, v


def finish_layer(
  params: ServingParams,
  config: ModelConfig,
  layer: jax.Array,
  x: jax.Array,
  attended: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
  """Adds attention's output [M, H, Dh] and the MLP of int32 layer [] to x [D, M].

  Returns: the sum, and int32 [M, k], the experts of a mixture.
  """
  stacked = params.model['layers']

  def added(x: jax.Array, y: jax.Array, post_norm: str) -> jax.Array:
    return x + (_norm(config, stacked[post_norm]['scale'][layer], y) if config.post_norms else y)

  columns = attended.reshape(x.shape[1], -1).astype(x.dtype).T
  x = added(x, _product(params, 'o', layer, columns), 'post_attn_norm')
  normed = _norm(config, stacked['mlp_norm']['scale'][layer], x)
  if config.num_experts:
    mixed, experts = _mixture(stacked, config, layer, normed)
    return added(x, mixed, 'post_mlp_norm'), experts
  both = _product(params, 'gate_up', layer, normed)
  gate, up = jnp.split(both, 2, axis=0)
  gated = decoder.ACTIVATIONS[config.activation](gate) * up
  return added(x, _product(params, 'down', layer, gated), 'post_mlp_norm'), None


def _mixture(
  stacked: decoder.Params, config: ModelConfig, layer: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """What the experts of int32 layer [] make of x [D, M], and which ones they were, int32 [M, k]."""
  parts = (stacked[f'experts_{name}']['kernel'] for name in ('gate', 'up', 'down'))
  kernels = ExpertKernels(*(part.reshape(-1, *part.shape[2:]) for part in parts))
  router, first = stacked['router']['kernel'][layer], layer * config.num_experts
  mixed, routing = apply_mixture(config, x.T, router, kernels, first=first)
  return mixed.T, routing.experts


def logits_of(params: ServingParams, config: ModelConfig, x: jax.Array) -> jax.Array:
  """Hidden states x [D, M] before the final norm -> logits float32 [V, M]."""
  normed = _norm(config, params.model['final_norm']['scale'], x)
  return decoder.capped(
    config,
    jnp.matmul(decoder.lm_head(params.model, config), normed, preferred_element_type=jnp.float32),
  )
