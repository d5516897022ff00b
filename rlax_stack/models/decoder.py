"""One decoder family in flax NNX: Llama, Mistral, Qwen, Phi, Gemma and mixtures of experts, by configuration.

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

A mixture has, instead of gate, up and down:

    layers/router/kernel [L, E, D]    layers/experts_{gate,up,down}/kernel [L, E, out, in]
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.experts import ExpertKernels, ExpertLinear, Routing, apply_mixture
from rlax_stack.models.linear import Linear
from rlax_stack.models.norms import RMSNorm
from rlax_stack.models.placement import placed_layer, placed_rows
from rlax_stack.models.remat import named_input, remat_policy
from rlax_stack.models.rotary import rotate, rotation

Params = dict[str, Any]
Attend = Callable[..., Any]  # of queries, keys and values, and of what a layer has of its own
ObserveRouter = Callable[[Routing], Any]

# What the gate of the MLP goes through.
ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True)}


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
  return ACTIVATIONS[activation](gate) * up


class DecoderLayer(nnx.Module):
  """Pre-norm attention and a gated MLP, or a mixture of them, with a pluggable attention."""

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
    if config.num_experts:
      experts, width = config.num_experts, config.moe_intermediate_size
      self.router = linear(hidden, experts, bias=False)
      self.experts_gate = ExpertLinear(experts, hidden, width, rngs=rngs)
      self.experts_up = ExpertLinear(experts, hidden, width, rngs=rngs)
      self.experts_down = ExpertLinear(experts, width, hidden, rngs=rngs)
    else:
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
    if not config.num_experts:
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

  def _mixture(
    self, x: jax.Array, mesh: Mesh | None, replay: jax.Array | None
  ) -> tuple[jax.Array, Routing]:
    parts = (self.experts_gate, self.experts_up, self.experts_down)
    kernels = ExpertKernels(*(part.kernel.get_value() for part in parts))
    router = self.router.kernel.get_value()
    return apply_mixture(self.config, x, router, kernels, mesh=mesh, replay=replay)

  def __call__(
    self,
    x: jax.Array,
    sin: jax.Array,
    cos: jax.Array,
    attend: Attend,
    *,
    mesh: Mesh | None = None,
    observe: ObserveRouter | None = None,
    replay: jax.Array | None = None,
  ) -> tuple[jax.Array, Any]:
    """x [..., D] -> (x [..., D], aux). `attend(q, k, v)` returns (output [..., H, Dh], aux).

    With `observe`, of a mixture, aux is (aux of attend, observe(routing)). mesh: see `experts.mix`;
    replay: see `experts.route`.
    """
    attended, aux = attend(*self._qkv(self.attn_norm(x), sin, cos))
    attended = self.o_proj(attended.reshape(*x.shape[:-1], -1).astype(x.dtype))
    x = x + (self.post_attn_norm(attended) if self.config.post_norms else attended)
    if self.config.num_experts:
      fed, routing = self._mixture(self.mlp_norm(x), mesh, replay)
      aux = aux if observe is None else (aux, observe(routing))
    else:
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
    mesh: Mesh | None = None,
    observe: ObserveRouter | None = None,
    replay: jax.Array | None = None,
  ) -> tuple[jax.Array, Any]:
    """tokens, positions int32 [R, T] -> (hidden [R, T, D], aux of layers stacked).

    With `of_layers`, arrays [L, ...], attend gets those of its layer as a fourth argument. mesh, observe and, with an
    axis of layers in front, replay: see DecoderLayer.
    """
    config = self.config
    graph, stacked = nnx.split(self.layers)
    rotations = rotation(config, positions)
    local = None if config.local_rope_theta is None else rotation(config, positions, local=True)

    def layer(x, of_layer):
      state, inputs, sees_all, experts = of_layer
      x, state = named_input(placed_rows(x, mesh)), placed_layer(state, mesh)
      given = () if inputs is None else (inputs,)
      named = {} if sees_all is None else {'sees_all': sees_all}
      sin, cos = rotations
      if local is not None and sees_all is not None:
        sin, cos = select(sees_all, rotations, local)

      def attend_here(q, k, v):
        return attend(q, k, v, *given, **named)

      decode = nnx.merge(graph, state)
      return decode(x, sin, cos, attend_here, mesh=mesh, observe=observe, replay=experts)

    policy = remat_policy(remat)
    if policy is not None:
      layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    of_each = (stacked, of_layers, layers_that_see_all(config), replay)
    x, aux = jax.lax.scan(layer, self.embedder(tokens, compute_dtype), of_each)
    return self.final_norm(placed_rows(x, mesh)), aux


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
  mesh: Mesh | None = None,
  replay: jax.Array | None = None,
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
    mesh: where rows and parameters live; a mixture splits its work by it.
    replay: int [L, R, T, k], experts that tokens of a mixture go through, -1 where they are free.

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
    mesh=mesh,
    replay=replay,
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
  mesh: Mesh | None = None,
  observe: ObserveRouter | None = None,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
  """As `hidden_states`, but attend returns (output, aux): aux comes back stacked over layers.

  With `of_layers`, arrays [L, ...], attend gets those of its layer as a fourth argument. With `observe`, of a mixture,
  what comes back is (aux, what `observe` makes of each layer's Routing).
  """
  graph, state = _abstract_decoder(config)
  decoder = nnx.merge(graph, _with_values(state, params))
  return decoder(
    tokens,
    positions,
    attend,
    compute_dtype=compute_dtype,
    remat=remat,
    of_layers=of_layers,
    mesh=mesh,
    observe=observe,
    replay=replay,
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
