"""`config.json` of Hugging Face to `ModelConfig` and back.

Only what the decoder really computes is accepted: a field that would change the mathematics
(another activation, biases elsewhere, layers of mixed kinds) is refused by name, never ignored.
"""

from collections.abc import Mapping
from typing import Any

from rlax_stack.errors import ConfigError, ModelFileError
from rlax_stack.models.config import ModelConfig, RopeScaling

_FAMILIES = ('llama', 'mistral', 'mixtral', 'qwen2', 'qwen3', 'qwen3_moe')
# What transformers takes for an absent key, where the families differ from llama.
_DEFAULTS = {
  'llama': {'max_position_embeddings': 2048},
  'mistral': {'max_position_embeddings': 131072, 'num_key_value_heads': 8, 'sliding_window': 4096},
  'qwen2': {'max_position_embeddings': 32768, 'num_key_value_heads': 32, 'sliding_window': 4096},
  'qwen3': {
    'max_position_embeddings': 32768,
    'num_key_value_heads': 32,
    'sliding_window': 4096,
    'head_dim': 128,
  },
  'mixtral': {
    'max_position_embeddings': 131072,
    'num_key_value_heads': 8,
    'num_experts': 8,
    'num_experts_per_tok': 2,
    'rms_norm_eps': 1e-5,
    'rope_theta': 1e6,
  },
  'qwen3_moe': {
    'max_position_embeddings': 32768,
    'num_key_value_heads': 4,
    'sliding_window': 4096,
    'num_experts': 128,
    'num_experts_per_tok': 8,
    'moe_intermediate_size': 768,
    'norm_topk_prob': False,
  },
}
_ARCHITECTURES = {
  'llama': 'LlamaForCausalLM',
  'mistral': 'MistralForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'mixtral': 'MixtralForCausalLM',
  'qwen3_moe': 'Qwen3MoeForCausalLM',
}


def config_from_hf(fields: Mapping[str, Any]) -> ModelConfig:
  """Reads the fields of a `config.json` of a Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE model.

  Raises:
    ModelFileError: an unknown family, a missing or impossible field, or an unsupported feature.
  """
  family = fields.get('model_type')
  if family not in _FAMILIES:
    raise ModelFileError(
      f'config.json: model_type {family!r} is not supported. '
      f'Use a model of type {", ".join(_FAMILIES)}.'
    )
  merged = {**_DEFAULTS[family], **fields}
  _refuse_unsupported(family, merged)
  heads = _required(merged, 'num_attention_heads')
  hidden = _required(merged, 'hidden_size')
  head_dim = merged.get('head_dim')
  if head_dim is None:
    head_dim = _derived_head_dim(hidden, heads)
  kv_heads = merged.get('num_key_value_heads')
  theta, scaling = _rope(merged)
  try:
    return ModelConfig(
      vocab_size=_required(merged, 'vocab_size'),
      hidden_size=hidden,
      intermediate_size=_required(merged, 'intermediate_size'),
      num_layers=_required(merged, 'num_hidden_layers'),
      num_heads=heads,
      num_kv_heads=heads if kv_heads is None else kv_heads,
      head_dim=head_dim,
      rope_theta=theta,
      rope_scaling=scaling,
      rms_norm_eps=merged.get('rms_norm_eps', 1e-6),
      tie_embeddings=merged.get('tie_word_embeddings', False),
      attention_bias=family == 'qwen2',
      qk_norm=family in ('qwen3', 'qwen3_moe'),
      sliding_window=_sliding_window(family, merged),
      max_context=merged['max_position_embeddings'],
      **_experts(family, merged),
    )
  except ConfigError as error:
    raise ModelFileError(f'config.json: {error}') from error


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """The fields of a `config.json` that transformers loads as the same model.

  Raises:
    ModelFileError: a mixture of features that no family of transformers has.
  """
  if config.qk_norm and config.attention_bias:
    raise ModelFileError(
      'qk_norm together with attention_bias has no Hugging Face family; export needs one of them.'
    )
  if config.num_experts:
    family = _family_of_mixture(config)
  elif config.qk_norm:
    family = 'qwen3'
  elif config.attention_bias:
    family = 'qwen2'
  else:
    family = 'llama' if config.sliding_window is None else 'mistral'
  fields = {
    'architectures': [_ARCHITECTURES[family]],
    'model_type': family,
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'intermediate_size': config.intermediate_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': config.max_context,
    'rms_norm_eps': config.rms_norm_eps,
    'rope_theta': config.rope_theta,
    'rope_scaling': _scaling_to_hf(config),
    'tie_word_embeddings': config.tie_embeddings,
    'attention_dropout': 0.0,
  }
  return fields | _fields_of_family(family, config)


def _fields_of_family(family: str, config: ModelConfig) -> dict[str, Any]:
  if family == 'llama':
    return {'attention_bias': False, 'mlp_bias': False}
  sliding = config.sliding_window is not None
  fields: dict[str, Any] = {'sliding_window': config.sliding_window}
  if family in ('qwen2', 'qwen3'):
    fields['max_window_layers'] = 0 if sliding else config.num_layers
  if family.startswith('qwen'):
    fields['use_sliding_window'] = sliding
  if family.startswith('qwen3'):
    fields['attention_bias'] = False
  if family == 'mixtral':
    fields |= {
      'intermediate_size': config.moe_intermediate_size,
      'num_local_experts': config.num_experts,
      'num_experts_per_tok': config.experts_per_token,
    }
  if family == 'qwen3_moe':
    fields |= {
      'num_experts': config.num_experts,
      'num_experts_per_tok': config.experts_per_token,
      'moe_intermediate_size': config.moe_intermediate_size,
      'norm_topk_prob': config.norm_topk_prob,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }
  return fields


def _family_of_mixture(config: ModelConfig) -> str:
  if config.qk_norm:
    return 'qwen3_moe'
  if config.attention_bias or not config.norm_topk_prob:
    raise ModelFileError(
      'a mixture of experts without qk_norm is Mixtral, which has no attention_bias and normalises, got '
      f'{config.attention_bias=} and {config.norm_topk_prob=}. It has no Hugging Face family.'
    )
  return 'mixtral'


def _experts(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of ModelConfig that a mixture has."""
  if family not in ('mixtral', 'qwen3_moe'):
    return {}
  step, dense = fields.get('decoder_sparse_step', 1), fields.get('mlp_only_layers') or []
  if step != 1 or dense:
    raise ModelFileError(
      f'config.json: decoder_sparse_step={step!r} and mlp_only_layers={dense!r} put dense layers between those of '
      'experts, which is not supported. Use a model whose layers are all sparse (step 1, no such layers).'
    )
  width = 'intermediate_size' if family == 'mixtral' else 'moe_intermediate_size'
  # transformers 5 calls the number of experts by either name.
  count = fields.get('num_local_experts')
  return {
    'num_experts': _required(fields, 'num_experts') if count is None else count,
    'experts_per_token': _required(fields, 'num_experts_per_tok'),
    'moe_intermediate_size': _required(fields, width),
    'norm_topk_prob': family == 'mixtral' or fields['norm_topk_prob'],
  }


def _required(fields: Mapping[str, Any], name: str) -> Any:
  if fields.get(name) is None:
    raise ModelFileError(f'config.json: {name} is missing. Download the model again.')
  return fields[name]


def _derived_head_dim(hidden: Any, heads: Any) -> int:
  whole = all(isinstance(value, int) and value > 0 for value in (hidden, heads))
  if not whole or hidden % heads:
    raise ModelFileError(
      'config.json: num_attention_heads must divide hidden_size where head_dim is absent, '
      f'got {heads!r} and {hidden!r}.'
    )
  return hidden // heads


def _refuse_unsupported(family: str, fields: Mapping[str, Any]) -> None:
  expected = {'hidden_act': 'silu', 'mlp_bias': False, 'partial_rotary_factor': 1.0}
  if family != 'qwen2':  # transformers gives every Qwen2 q, k and v biases whatever this field says
    expected['attention_bias'] = False
  for name, value in expected.items():
    if fields.get(name, value) != value:
      raise ModelFileError(
        f'config.json: {name}={fields[name]!r} is not supported, only {value!r}.'
      )
  if fields.get('quantization_config') is not None:
    raise ModelFileError(
      'config.json: quantization_config is not supported. Use the unquantised model, or a GGUF in '
      'F32, F16, BF16, Q8_0, Q4_0 or Q4_1.'
    )


def _sliding_window(family: str, fields: Mapping[str, Any]) -> int | None:
  if family == 'llama':
    return None
  window = fields.get('sliding_window')
  if family in ('mistral', 'mixtral') or window is None:
    return window
  if not fields.get('use_sliding_window', False):
    return None
  if family == 'qwen3_moe':  # transformers gives the window to all of its layers
    return window
  kinds = _attention_kinds(fields)
  if kinds == {'full'}:
    return None
  if kinds != {'sliding'}:
    raise ModelFileError(
      f'config.json: layers of mixed attention ({sorted(kinds)}) are not supported. '
      'Set use_sliding_window to false where the context is shorter than the window.'
    )
  return window


def _attention_kinds(fields: Mapping[str, Any]) -> set[str]:
  layers = fields.get('layer_types')
  if isinstance(layers, list):
    return {str(kind).removesuffix('_attention') for kind in layers}
  first, count = fields.get('max_window_layers', 28), fields.get('num_hidden_layers')
  if layers is not None or not isinstance(first, int) or not isinstance(count, int):
    raise ModelFileError(
      'config.json: layer_types must be a list, max_window_layers and num_hidden_layers whole '
      f'numbers, got {layers!r}, {first!r} and {count!r}.'
    )
  return {'full' if i < first else 'sliding' for i in (0, count - 1)}


def _rope(fields: Mapping[str, Any]) -> tuple[Any, RopeScaling | None]:
  """theta and scaling, from `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
  new = fields.get('rope_parameters') or {}
  old = fields.get('rope_scaling') or {}
  if not isinstance(new, Mapping) or not isinstance(old, Mapping):
    raise ModelFileError('config.json: rope_parameters and rope_scaling must be objects.')
  rope = {**old, **new}
  theta = rope.get('rope_theta', fields.get('rope_theta', 10000.0))
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if rope.get('partial_rotary_factor', 1.0) != 1.0:
    raise ModelFileError('config.json: partial_rotary_factor is not supported, only 1.0.')
  try:
    if kind == 'default':
      return theta, None
    if kind == 'linear':
      return theta, RopeScaling(kind='linear', factor=_required(rope, 'factor'))
    if kind == 'llama3':
      return theta, RopeScaling(
        kind='llama3',
        factor=_required(rope, 'factor'),
        low_freq_factor=_required(rope, 'low_freq_factor'),
        high_freq_factor=_required(rope, 'high_freq_factor'),
        original_max_position=_required(rope, 'original_max_position_embeddings'),
      )
    if kind == 'longrope' and _is_plain_factors(rope):
      return theta, RopeScaling(kind='factors', factors=tuple(rope['long_factor']))
  except (ConfigError, TypeError) as error:
    raise ModelFileError(f'config.json: rope_scaling: {error}') from error
  raise ModelFileError(
    f'config.json: rope_type {kind!r} is not supported. Use default, linear or llama3 scaling.'
  )


def _is_plain_factors(rope: Mapping[str, Any]) -> bool:
  """LongRoPE of one list for every length: what `config_to_hf` writes for 'factors'."""
  return rope.get('attention_factor') == 1.0 and rope.get('long_factor') == rope.get('short_factor')


def _scaling_to_hf(config: ModelConfig) -> dict[str, Any] | None:
  scaling = config.rope_scaling
  if scaling is None:
    return None
  if scaling.kind == 'linear':
    return {'rope_type': 'linear', 'factor': scaling.factor}
  if scaling.kind == 'llama3':
    return {
      'rope_type': 'llama3',
      'factor': scaling.factor,
      'low_freq_factor': scaling.low_freq_factor,
      'high_freq_factor': scaling.high_freq_factor,
      'original_max_position_embeddings': scaling.original_max_position,
    }
  return {
    'rope_type': 'longrope',
    'factor': 1.0,
    'attention_factor': 1.0,
    'long_factor': list(scaling.factors),
    'short_factor': list(scaling.factors),
    'original_max_position_embeddings': config.max_context,
  }
