"""The shape of a decoder, as frozen data: one `ModelConfig` covers every family of the project.

Llama 3.x, SmolLM2, Mistral, Qwen2/2.5, Qwen3, Phi-3 and 4, Gemma 2 and Gemma 3, Mixtral and Qwen3-MoE
differ only in the fields below. Not for the files that shapes are read from (`hf_config.py`,
`gguf_config.py`). Invariant: a `ModelConfig` that exists is consistent.
"""

import dataclasses
import itertools

from rlax_stack.errors import ConfigError

_SIZE_LIMIT = 2**31 - 1  # sizes are int32 on the device
LAYER_LIMIT = 1024  # far above every real model; a hostile file asks for more
_EXPERT_LIMIT = 4096
_FLOAT_LIMIT = 1e30
_ROPE_KINDS = ('linear', 'llama3', 'factors')
_FLAGS = (
  'tie_embeddings',
  'attention_bias',
  'qk_norm',
  'post_norms',
  'unit_offset_norms',
  'scale_embeddings',
  'norm_topk_prob',
)
_ACTIVATIONS = ('silu', 'gelu_tanh')


def _positive_int(owner: str, name: str, value: object, limit: int = _SIZE_LIMIT) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
    raise ConfigError(f'{owner}.{name} must be a whole number from 1 to {limit}, got {value!r}.')


def _positive_float(owner: str, name: str, value: object) -> None:
  # NaN fails both comparisons.
  if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _FLOAT_LIMIT:
    raise ConfigError(f'{owner}.{name} must be a finite number above 0, got {value!r}.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the context of pre-training.

  kind: 'linear' divides every frequency by `factor`; 'llama3' divides the low ones, leaves the high
  ones and blends in between (`low_freq_factor`, `high_freq_factor`, and `original_max_position` in
  tokens); 'factors' divides frequency i by `factors[i]` (rotary_dim / 2 of them), as a GGUF's
  `rope_freqs` tensor says, and multiplies sine and cosine by `attention_factor` (LongRoPE).
  """

  kind: str
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192
  factors: tuple[float, ...] = ()
  attention_factor: float = 1.0

  def __post_init__(self):
    if self.kind not in _ROPE_KINDS:
      raise ConfigError(f'RopeScaling.kind must be one of {_ROPE_KINDS}, got {self.kind!r}.')
    for name in ('factor', 'low_freq_factor', 'high_freq_factor', 'attention_factor'):
      _positive_float('RopeScaling', name, getattr(self, name))
    _positive_int('RopeScaling', 'original_max_position', self.original_max_position)
    if self.high_freq_factor <= self.low_freq_factor:
      raise ConfigError(
        'RopeScaling.high_freq_factor must be above low_freq_factor, got '
        f'{self.high_freq_factor=} and {self.low_freq_factor=}.'
      )
    if (self.kind == 'factors') != bool(self.factors):
      raise ConfigError(
        "RopeScaling.factors belong to kind 'factors', got kind "
        f'{self.kind!r} and {len(self.factors)} of them.'
      )
    if self.attention_factor != 1.0 and self.kind != 'factors':
      raise ConfigError(
        "RopeScaling.attention_factor belongs to kind 'factors', got kind "
        f'{self.kind!r} and {self.attention_factor}.'
      )
    for value in self.factors:
      _positive_float('RopeScaling', 'factors', value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """One decoder.

  head_dim is even and need not be hidden_size / num_heads. attention_bias: q, k, v carry biases
  (Qwen2). qk_norm: RMS norm over each head's q and k (Qwen3). sliding_window: a token sees that
  many tokens, itself included; None sees all. max_context: tokens the model was trained to see.

  Phi: partial_rotary_factor, the first part of each head that turns. Gemma: global_layers, the
  layers that see all although the others have a window, ascending; local_rope_theta, of the layers
  with a window where it is another one (they are not scaled); query_pre_attn_scalar, scores are
  divided by its root, head_dim's when None; attention_soft_cap and final_soft_cap, scores and
  logits become cap * tanh(x / cap); activation of the gate, 'silu' or 'gelu_tanh'; post_norms, the
  outputs of attention and MLP are normed before they are added; unit_offset_norms, norms multiply
  by 1 + scale, in float32; scale_embeddings, embeddings are multiplied by sqrt(hidden_size).

  num_experts: 0 is dense; else the MLP of every layer is a mixture of so many experts of width
  moe_intermediate_size, of which each token takes experts_per_token (intermediate_size is then kept
  for the model's files alone). norm_topk_prob: the weights of those are divided by their sum.

  Raises:
    ConfigError: a field, or two together, that no decoder can have.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  rms_norm_eps: float = 1e-5
  tie_embeddings: bool = True
  attention_bias: bool = False
  qk_norm: bool = False
  sliding_window: int | None = None
  max_context: int = 2048
  partial_rotary_factor: float = 1.0
  global_layers: tuple[int, ...] = ()
  local_rope_theta: float | None = None
  query_pre_attn_scalar: int | None = None
  attention_soft_cap: float | None = None
  final_soft_cap: float | None = None
  activation: str = 'silu'
  post_norms: bool = False
  unit_offset_norms: bool = False
  scale_embeddings: bool = False
  num_experts: int = 0
  experts_per_token: int = 0
  moe_intermediate_size: int = 0
  norm_topk_prob: bool = True

  @property
  def rotary_dim(self) -> int:
    """Features of a head that turn with the position."""
    return int(self.head_dim * self.partial_rotary_factor)

  @property
  def attention_scale(self) -> float:
    """What products of queries and keys are multiplied by."""
    return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

  def __post_init__(self):
    for name in ('vocab_size', 'hidden_size', 'intermediate_size', 'max_context'):
      _positive_int('ModelConfig', name, getattr(self, name))
    for name in ('num_layers', 'num_heads', 'num_kv_heads', 'head_dim'):
      limit = LAYER_LIMIT if name == 'num_layers' else 2**16
      _positive_int('ModelConfig', name, getattr(self, name), limit)
    for name in ('rope_theta', 'rms_norm_eps', 'partial_rotary_factor'):
      _positive_float('ModelConfig', name, getattr(self, name))
    for name in _FLAGS:
      if not isinstance(getattr(self, name), bool):
        raise ConfigError(f'ModelConfig.{name} must be True or False, got {getattr(self, name)!r}.')
    for name in ('sliding_window', 'query_pre_attn_scalar'):
      if getattr(self, name) is not None:
        _positive_int('ModelConfig', name, getattr(self, name))
    for name in ('local_rope_theta', 'attention_soft_cap', 'final_soft_cap'):
      if getattr(self, name) is not None:
        _positive_float('ModelConfig', name, getattr(self, name))
    if self.activation not in _ACTIVATIONS:
      raise ConfigError(
        f'ModelConfig.activation must be one of {_ACTIVATIONS}, got {self.activation!r}.'
      )
    self._check_together()
    self._check_global_layers()
    self._check_experts()

  def _check_together(self) -> None:
    if self.num_heads % self.num_kv_heads:
      raise ConfigError(
        'ModelConfig.num_kv_heads must divide num_heads, got '
        f'{self.num_heads=} and {self.num_kv_heads=}. Correct the model config.'
      )
    if self.head_dim % 2:
      raise ConfigError(f'ModelConfig.head_dim must be even (rotary pairs), got {self.head_dim=}.')
    if self.partial_rotary_factor > 1 or self.rotary_dim % 2 or not self.rotary_dim:
      raise ConfigError(
        'ModelConfig.partial_rotary_factor must be at most 1 and leave an even part of head_dim, '
        f'got {self.partial_rotary_factor} of {self.head_dim=}.'
      )
    factors = self.rope_scaling.factors if self.rope_scaling else ()
    if factors and len(factors) != self.rotary_dim // 2:
      raise ConfigError(
        'RopeScaling.factors must hold one factor for each rotary pair, got '
        f'{len(factors)} for {self.rotary_dim=}.'
      )

  def _check_global_layers(self) -> None:
    layers = self.global_layers
    if not isinstance(layers, tuple) or not all(type(layer) is int for layer in layers):
      raise ConfigError(f'ModelConfig.global_layers must be a tuple of numbers, got {layers!r}.')
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not ascending or any(not 0 <= layer < self.num_layers for layer in layers):
      raise ConfigError(
        'ModelConfig.global_layers must be ascending numbers of layers from 0 to '
        f'{self.num_layers - 1}, got {layers}.'
      )
    if layers and (self.sliding_window is None or len(layers) == self.num_layers):
      raise ConfigError(
        'ModelConfig.global_layers are those that see all while others have a sliding_window, got '
        f'{len(layers)} of {self.num_layers} layers and {self.sliding_window=}. Without windows '
        'leave it empty.'
      )
    if self.local_rope_theta is not None and not layers:
      raise ConfigError(
        'ModelConfig.local_rope_theta is of the layers that are not in global_layers, which is '
        'empty. Set rope_theta instead.'
      )

  def _check_experts(self) -> None:
    names = ('experts_per_token', 'moe_intermediate_size')
    if self.num_experts == 0 and not isinstance(self.num_experts, bool):
      for name in names:
        if getattr(self, name) != 0:
          raise ConfigError(
            f'ModelConfig.{name} belongs to a mixture of experts, got {getattr(self, name)!r} with num_experts=0.'
          )
      return
    _positive_int('ModelConfig', 'num_experts', self.num_experts, _EXPERT_LIMIT)
    for name in names:
      _positive_int('ModelConfig', name, getattr(self, name))
    if self.activation != 'silu':
      raise ConfigError(
        f"ModelConfig.activation must be 'silu' in a mixture of experts, got {self.activation!r}."
      )
    if self.experts_per_token > self.num_experts:
      raise ConfigError(
        'ModelConfig.experts_per_token must be at most num_experts, got '
        f'{self.experts_per_token=} and {self.num_experts=}.'
      )
