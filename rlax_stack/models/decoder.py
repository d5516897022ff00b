"""One decoder family in flax NNX: Llama 3, SmolLM2, Mistral, Qwen2, Qwen3, Phi and Gemma by configuration.

Layers are stacked on axis 0 and scanned. Attention is not computed here: the caller passes
`attend`, so that packed training rows, prefill and decode share every other line of the model.
Where some layers see all and others have a window, attend also gets `sees_all`, a bool scalar.
Outside this module parameters are a plain nested dict of arrays; kernels are stored [out, in], as
Hugging Face stores them:

    embedder/embedding [V, D]    final_norm/scale [D]    lm_head/kernel [V, D] (untied only)
    layers/{attn,mlp}_norm/scale [L, D]
    layers/{q,k,v,o,gate,up,down}_proj/kernel [L, out, in]
    layers/{q,k,v}_proj/bias [L, out] (Qwen2)    layers/{q,k}_norm/scale [L, Dh] (Qwen3, Gemma 3)
    layers/post_{attn,mlp}_norm/scale [L, D] (Gemma)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.quantised import QuantisedKernel, rows_product
from rlax_stack.models.remat import named_input, remat_policy
from rlax_stack.models.rotary import rotate, rotation

Params = dict[str, Any]
Attend = Callable[..., Any]  # of queries, keys and values, and of what a layer has of its own

# What the gate of the MLP goes through.
ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True)}

_PRECISE_BLOCK = 64  # inputs summed at once where the highest precision is asked for


class Linear(nnx.Module):
  """y = x Wᵀ (+ b) with W stored [out, in], quantised or not; computes in the dtype of x.

  Under `jax.default_matmul_precision('highest')` the sum over `in` is taken in blocks: less rounding, and
  slower. For comparing logits, not for training.
  """

  def __init__(self, in_size: int, out_size: int, *, bias: bool, rngs: nnx.Rngs):
    scale = in_size**-0.5
    self.kernel = nnx.Param(
      scale * jax.random.truncated_normal(rngs.params(), -2.0, 2.0, (out_size, in_size))
    )
    self.bias = nnx.Param(jnp.zeros((out_size,), jnp.float32)) if bias else None

  def __call__(self, x: jax.Array) -> jax.Array:
    # Two-dimensional, because the kernel's gradient over two row axes at once is slower on CPU.
    flat = x.reshape(-1, x.shape[-1])
    kernel = self.kernel.get_value()
    if isinstance(kernel, QuantisedKernel):
      y = rows_product(flat, kernel)
    else:
      y = _product(flat, kernel.astype(x.dtype))
    y = y.reshape(*x.shape[:-1], y.shape[1])
    if self.bias is None:
      return y
    return y + self.bias[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x [M, in] Wᵀ [in, out]; the CPU sums one long chain in float32, whatever precision is asked for."""
  contract = (((1,), (1,)), ((), ()))
  if jax.config.jax_default_matmul_precision not in ('highest', 'float32'):
    return jax.lax.dot_general(x, kernel, contract)
  parts = range(0, x.shape[1], _PRECISE_BLOCK)
  blocks = [(x[:, i : i + _PRECISE_BLOCK], kernel[:, i : i + _PRECISE_BLOCK]) for i in parts]
  return functools.reduce(jnp.add, [jax.lax.dot_general(*block, contract) for block in blocks])


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


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
  return ACTIVATIONS[activation](gate) * up


class DecoderLayer(nnx.Module):
  """Pre-norm attention and gated MLP, with a pluggable attention."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    linear = functools.partial(Linear, rngs=rngs)
    norm = functools.partial(
      RMSNorm, epsilon=config.rms_norm_eps, unit_offset=config.unit_offset_norms
    )
    self.attn_norm = norm(hidden)
    self.q_proj = linear(hidden, queries, bias=config.attention_bias)
    self.k_proj = linear(hidden, keys, bias=config.attention_bias)
    self.v_proj = linear(hidden, keys, bias=config.attention_bias)
    self.gate_proj = linear(hidden, config.intermediate_size, bias=False)
    self.up_proj = linear(hidden, config.intermediate_size, bias=False)
    if config.qk_norm:
      self.q_norm = norm(config.head_dim)
      self.k_norm = norm(config.head_dim)
    self.o_proj = linear(queries, hidden, bias=False)
    self.mlp_norm = norm(hidden)
    if config.post_norms:
      self.post_attn_norm = norm(hidden)
      self.post_mlp_norm = norm(hidden)
    self.down_proj = linear(config.intermediate_size, hidden, bias=False)

  def _qkv(self, x: jax.Array, sin: jax.Array, cos: jax.Array) -> tuple[jax.Array, ...]:
    """Queries [..., H, Dh], keys and values [..., K, Dh], normalised (qk_norm) and rotated."""
    config = self.config
    projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
    q, k, v = (y.reshape(*y.shape[:-1], -1, config.head_dim) for y in projected)
    if config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    return rotate(q, sin, cos), rotate(k, sin, cos), v

  def _mlp(self, x: jax.Array) -> jax.Array:
    return self.down_proj(_gated(self.gate_proj(x), self.up_proj(x), self.config.activation))

  def __call__(
    self, x: jax.Array, sin: jax.Array, cos: jax.Array, attend: Attend
  ) -> tuple[jax.Array, Any]:
    """x [..., D] -> (x [..., D], aux). `attend(q, k, v)` returns (output [..., H, Dh], aux)."""
    attended, aux = attend(*self._qkv(self.attn_norm(x), sin, cos))
    attended = self.o_proj(attended.reshape(*x.shape[:-1], -1).astype(x.dtype))
    x = x + (self.post_attn_norm(attended) if self.config.post_norms else attended)
    fed = self._mlp(self.mlp_norm(x))
    return x + (self.post_mlp_norm(fed) if self.config.post_norms else fed), aux


class Embedder(nnx.Module):
  """Token embeddings [V, D]; the LM head too where the model ties them."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    shape = (config.vocab_size, config.hidden_size)
    self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))

  def __call__(self, tokens: jax.Array, dtype: Any) -> jax.Array:
    return _embedded(self.config, self.embedding[...], tokens, dtype)


def _embedded(config: ModelConfig, table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
  found = table[tokens].astype(dtype)
  if not config.scale_embeddings:
    return found
  # The factor is rounded to the dtype too, as the reference implementations do.
  return found * jnp.asarray(config.hidden_size**0.5, dtype)


class Decoder(nnx.Module):
  """The whole model up to the final norm; the LM head is applied by whoever needs log-probs."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.embedder = Embedder(config, rngs=rngs)
    make_layers = nnx.vmap(
      lambda key: DecoderLayer(config, rngs=nnx.Rngs(params=key)), in_axes=0, out_axes=0
    )
    self.layers = make_layers(jax.random.split(rngs.params(), config.num_layers))
    self.final_norm = RMSNorm(
      config.hidden_size, config.rms_norm_eps, unit_offset=config.unit_offset_norms
    )
    if not config.tie_embeddings:
      self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, rngs=rngs)

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    *,
    compute_dtype: Any = jnp.float32,
    remat: str = 'none',
    of_layers: Any = None,
  ) -> tuple[jax.Array, Any]:
    """tokens, positions int32 [R, T] -> (hidden [R, T, D], aux of attend stacked over layers).

    With `of_layers`, arrays [L, ...], attend gets those of its layer as a fourth argument.
    """
    config = self.config
    graph, stacked = nnx.split(self.layers)
    rotations = rotation(config, positions)
    local = None if config.local_rope_theta is None else rotation(config, positions, local=True)

    def layer(x, of_layer):
      x = named_input(x)
      state, inputs, sees_all = of_layer
      given = () if inputs is None else (inputs,)
      named = {} if sees_all is None else {'sees_all': sees_all}
      sin, cos = rotations
      if local is not None and sees_all is not None:
        sin, cos = select(sees_all, rotations, local)
      return nnx.merge(graph, state)(x, sin, cos, lambda q, k, v: attend(q, k, v, *given, **named))

    policy = remat_policy(remat)
    if policy is not None:
      layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    of_each = (stacked, of_layers, layers_that_see_all(config))
    x, aux = jax.lax.scan(layer, self.embedder(tokens, compute_dtype), of_each)
    return self.final_norm(x), aux


def layers_that_see_all(config: ModelConfig) -> jax.Array | None:
  """Whether each layer does, bool [L]; None where all layers are alike."""
  if not config.global_layers:
    return None
  return jnp.asarray(np.isin(np.arange(config.num_layers), config.global_layers))


def select(which: jax.Array, yes: Any, no: Any) -> Any:
  """`yes` where the bool scalar `which` is true, else `no`: trees of arrays of equal shapes."""
  return jax.tree.map(lambda a, b: jnp.where(which, a, b), yes, no)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
  """Random float32 parameters: truncated normal kernels scaled by fan-in, embeddings of 0.02."""

  @jax.jit  # one program instead of a compilation per tensor
  def make(key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)), nnx.Param))

  return make(key)


@functools.lru_cache(maxsize=32)
def _abstract_decoder(config: ModelConfig) -> tuple[Any, Any]:
  abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0)))
  return nnx.split(abstract)


def abstract_params(config: ModelConfig) -> Params:
  """Shapes and dtypes of the parameters as a tree of jax.ShapeDtypeStruct; allocates nothing."""
  return nnx.to_pure_dict(_abstract_decoder(config)[1])


def _with_values(state: Any, params: Params) -> Any:
  """A copy of the abstract NNX state that holds `params`."""
  filled = jax.tree.map(lambda leaf: leaf, state)
  nnx.replace_by_pure_dict(filled, params)
  return filled


def hidden_states(
  params: Params,
  config: ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  attend: Attend,
  *,
  compute_dtype: Any = jnp.float32,
  remat: str = 'none',
) -> jax.Array:
  """Hidden states after the final norm.

  Args:
    params: the parameter dict of this module's docstring; any float dtype, cast where used.
    config: shape of the model.
    tokens: int32 [R, T].
    positions: int32 [R, T], depth from the root of the row's trie (RoPE).
    attend: (q [R, T, H, Dh], k [R, T, K, Dh], v) -> [R, T, H, Dh]; q and k are rotated, q is not
      scaled. With `config.global_layers` it gets the keyword `sees_all`, bool [], of its layer.
    compute_dtype: dtype of activations.
    remat: one of `remat.REMAT_POLICIES`.

  Returns:
    [R, T, D] in compute_dtype.
  """
  hidden, _ = hidden_states_and_aux(
    params,
    config,
    tokens,
    positions,
    lambda q, k, v, **named: (attend(q, k, v, **named), None),
    compute_dtype=compute_dtype,
    remat=remat,
  )
  return hidden


def hidden_states_and_aux(
  params: Params,
  config: ModelConfig,
  tokens: jax.Array,
  positions: jax.Array,
  attend: Attend,
  *,
  compute_dtype: Any = jnp.float32,
  remat: str = 'none',
  of_layers: Any = None,
) -> tuple[jax.Array, Any]:
  """As `hidden_states`, but attend returns (output, aux): aux comes back stacked over layers.

  With `of_layers`, arrays [L, ...], attend gets those of its layer as a fourth argument.
  """
  graph, state = _abstract_decoder(config)
  decoder = nnx.merge(graph, _with_values(state, params))
  return decoder(
    tokens, positions, attend, compute_dtype=compute_dtype, remat=remat, of_layers=of_layers
  )


def embed(params: Params, config: ModelConfig, tokens: jax.Array, dtype: Any) -> jax.Array:
  """What tokens [...] enter the first layer as, [..., D] in `dtype`."""
  return _embedded(config, params['embedder']['embedding'], tokens, dtype)


def lm_head(params: Params, config: ModelConfig) -> jax.Array:
  """The output matrix [V, D]: the embeddings where they are tied."""
  if config.tie_embeddings:
    return params['embedder']['embedding']
  return params['lm_head']['kernel']


def capped(config: ModelConfig, logits: jax.Array) -> jax.Array:
  """Logits of the LM head, float32 of any shape, as the model means them: soft-capped where it says so."""
  cap = config.final_soft_cap
  return logits if cap is None else cap * jnp.tanh(logits / cap)
