"""The shape of a decoder, as frozen data: one `ModelConfig` covers every family of the project.

Llama 3.x, SmolLM2, Mistral, Qwen2/2.5, Qwen3, Mixtral and Qwen3-MoE differ only in the fields below. Not for the
files that shapes are read from (`hf_config.py`, `gguf_config.py`). Invariant: a `ModelConfig` that
exists is consistent.
"""

import dataclasses

from rlax_stack.errors import ConfigError

_SIZE_LIMIT = 2**31 - 1  # sizes are int32 on the device
_LAYER_LIMIT = 1024  # far above every real model; a hostile file asks for more
_EXPERT_LIMIT = 4096
_FLOAT_LIMIT = 1e30
_ROPE_KINDS = ('linear', 'llama3', 'factors')


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
  tokens); 'factors' divides frequency i by `factors[i]` (head_dim / 2 of them), as a GGUF's
  `rope_freqs` tensor says.
  """

  kind: str
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192
  factors: tuple[float, ...] = ()

  def __post_init__(self):
    if self.kind not in _ROPE_KINDS:
      raise ConfigError(f'RopeScaling.kind must be one of {_ROPE_KINDS}, got {self.kind!r}.')
    for name in ('factor', 'low_freq_factor', 'high_freq_factor'):
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
    for value in self.factors:
      _positive_float('RopeScaling', 'factors', value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """One decoder.

  head_dim is even and need not be hidden_size / num_heads. attention_bias: q, k, v carry biases
  (Qwen2). qk_norm: RMS norm over each head's q and k (Qwen3). sliding_window: a token sees that
  many tokens, itself included; None sees all. max_context: tokens the model was trained to see.

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
  num_experts: int = 0
  experts_per_token: int = 0
  moe_intermediate_size: int = 0
  norm_topk_prob: bool = True

  def __post_init__(self):
    for name in ('vocab_size', 'hidden_size', 'intermediate_size', 'max_context'):
      _positive_int('ModelConfig', name, getattr(self, name))
    for name in ('num_layers', 'num_heads', 'num_kv_heads', 'head_dim'):
      limit = _LAYER_LIMIT if name == 'num_layers' else 2**16
      _positive_int('ModelConfig', name, getattr(self, name), limit)
    for name in ('rope_theta', 'rms_norm_eps'):
      _positive_float('ModelConfig', name, getattr(self, name))
    for name in ('tie_embeddings', 'attention_bias', 'qk_norm', 'norm_topk_prob'):
      if not isinstance(getattr(self, name), bool):
        raise ConfigError(f'ModelConfig.{name} must be True or False, got {getattr(self, name)!r}.')
    if self.sliding_window is not None:
      _positive_int('ModelConfig', 'sliding_window', self.sliding_window)
    self._check_together()
    self._check_experts()

  def _check_together(self) -> None:
    if self.num_heads % self.num_kv_heads:
      raise ConfigError(
        'ModelConfig.num_kv_heads must divide num_heads, got '
        f'{self.num_heads=} and {self.num_kv_heads=}. Correct the model config.'
      )
    if self.head_dim % 2:
      raise ConfigError(f'ModelConfig.head_dim must be even (rotary pairs), got {self.head_dim=}.')
    factors = self.rope_scaling.factors if self.rope_scaling else ()
    if factors and len(factors) != self.head_dim // 2:
      raise ConfigError(
        'RopeScaling.factors must hold one factor for each rotary pair, got '
        f'{len(factors)} for {self.head_dim=}.'
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
    if self.experts_per_token > self.num_experts:
      raise ConfigError(
        'ModelConfig.experts_per_token must be at most num_experts, got '
        f'{self.experts_per_token=} and {self.num_experts=}.'
      )
