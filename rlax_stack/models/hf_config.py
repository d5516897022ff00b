"""`config.json` of Hugging Face to `ModelConfig`; the way back is `hf_export.py`.

Only what the decoder really computes is accepted: a field that would change the mathematics
(another activation, biases elsewhere, attention to later tokens) is refused by name, never ignored.
"""

import math
from collections.abc import Mapping
from typing import Any

from rlax_stack.errors import ConfigError, ModelFileError
from rlax_stack.models.config import LAYER_LIMIT, ModelConfig, RopeScaling

_FAMILIES = (
  'llama',
  'mistral',
  'mixtral',
  'qwen2',
  'qwen3',
  'qwen3_moe',
  'phi3',
  'gemma2',
  'gemma3_text',
)
_GEMMA = {
  'num_key_value_heads': 4,
  'head_dim': 256,
  'hidden_activation': 'gelu_pytorch_tanh',
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
}
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
  'phi3': {
    'max_position_embeddings': 4096,
    'original_max_position_embeddings': 4096,
    'rms_norm_eps': 1e-5,
  },
  'gemma2': {
    **_GEMMA,
    'max_position_embeddings': 8192,
    'attn_logit_softcapping': 50.0,
    'final_logit_softcapping': 30.0,
    'sliding_window_pattern': 2,
  },
  'gemma3_text': {
    **_GEMMA,
    'max_position_embeddings': 131072,
    'rope_theta': 1000000.0,
    'rope_local_base_freq': 10000.0,
    'sliding_window_pattern': 6,
  },
}


def config_from_hf(fields: Mapping[str, Any]) -> ModelConfig:
  """Reads the fields of a `config.json` of a text model of one of the families above.

  LongRoPE changes its frequencies past the context of pre-training, once for all tokens of a text; only texts up to
  there are supported, and `max_context` says so.

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
  try:
    return ModelConfig(
      vocab_size=_required(merged, 'vocab_size'),
      hidden_size=hidden,
      intermediate_size=_required(merged, 'intermediate_size'),
      num_layers=_required(merged, 'num_hidden_layers'),
      num_heads=heads,
      num_kv_heads=heads if kv_heads is None else kv_heads,
      head_dim=head_dim,
      rms_norm_eps=merged.get('rms_norm_eps', 1e-6),
      tie_embeddings=merged.get('tie_word_embeddings', False),
      attention_bias=family == 'qwen2',
      qk_norm=family in ('qwen3', 'qwen3_moe', 'gemma3_text'),
      **_places(family, merged),
      **(_gemma(merged, head_dim) if family.startswith('gemma') else {}),
      **_experts(family, merged),
    )
  except ConfigError as error:
    raise ModelFileError(f'config.json: {error}') from error


def _places(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
  """The fields that say how far a token sees, and how places turn queries and keys."""
  window, global_layers = _windows(family, fields)
  theta, scaling, max_context = _rope(_flat_rope(family, fields))
  local_theta = _local_theta(family, fields)
  if local_theta is not None and window is not None and not global_layers:
    theta, scaling = local_theta, None
  if not global_layers or (local_theta == theta and scaling is None):
    local_theta = None
  if family == 'phi3' and _positive(window) and window >= max_context:
    window = None  # no text is longer
  return {
    'sliding_window': window,
    'global_layers': global_layers,
    'rope_theta': theta,
    'rope_scaling': scaling,
    'local_rope_theta': local_theta,
    'max_context': max_context,
    'partial_rotary_factor': _partial_rotary_factor(family, fields),
  }


def _gemma(fields: Mapping[str, Any], head_dim: Any) -> dict[str, Any]:
  scalar = fields['query_pre_attn_scalar']
  return {
    'query_pre_attn_scalar': None if scalar == head_dim else scalar,
    'attention_soft_cap': fields.get('attn_logit_softcapping'),
    'final_soft_cap': fields.get('final_logit_softcapping'),
    'activation': 'gelu_tanh',
    'post_norms': True,
    'unit_offset_norms': True,
    'scale_embeddings': True,
  }


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
  expected: dict[str, Any] = {'mlp_bias': False}
  if family.startswith('gemma'):
    expected['hidden_activation'] = 'gelu_pytorch_tanh'
    if fields.get('use_bidirectional_attention') is not None:
      expected['use_bidirectional_attention'] = False
  else:
    expected['hidden_act'] = 'silu'
  if family == 'gemma3_text':  # transformers has the field and does not look at it
    expected['attn_logit_softcapping'] = None
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


def _windows(family: str, fields: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
  """The window, and the layers that see all in spite of it."""
  if family == 'llama':
    return None, ()
  window = fields.get('sliding_window')
  if window is None or family in ('mistral', 'mixtral', 'phi3'):
    return window, ()
  if family.startswith('qwen') and not fields.get('use_sliding_window', False):
    return None, ()
  if family == 'qwen3_moe':  # transformers gives the window to all of its layers
    return window, ()
  kinds = _attention_kinds(fields)
  if not set(kinds) <= {'full', 'sliding'}:
    raise ModelFileError(
      f'config.json: layer_types {sorted(set(kinds))} are not supported, only full_attention and '
      'sliding_attention.'
    )
  global_layers = tuple(i for i, kind in enumerate(kinds) if kind == 'full')
  return (None, ()) if len(global_layers) == len(kinds) else (window, global_layers)


def _attention_kinds(fields: Mapping[str, Any]) -> list[str]:
  """'full' or 'sliding' of each layer, or whatever else the file calls its kind."""
  layers, count = fields.get('layer_types'), fields.get('num_hidden_layers')
  first, every = fields.get('max_window_layers', 28), fields.get('sliding_window_pattern')
  if type(count) is not int or not 0 < count <= LAYER_LIMIT:
    raise ModelFileError(
      f'config.json: num_hidden_layers must be from 1 to {LAYER_LIMIT}, got {count!r}.'
    )
  if isinstance(layers, list):
    if len(layers) != count:
      raise ModelFileError(
        f'config.json: layer_types are {len(layers)}, but num_hidden_layers is {count}.'
      )
    return [str(kind).removesuffix('_attention') for kind in layers]
  if layers is not None or type(first) is not int or (every is not None and not _positive(every)):
    raise ModelFileError(
      'config.json: layer_types must be a list, max_window_layers and sliding_window_pattern whole '
      f'numbers, got {layers!r}, {first!r} and {every!r}.'
    )
  if every is not None:
    return ['sliding' if (i + 1) % every else 'full' for i in range(count)]
  return ['full' if i < first else 'sliding' for i in range(count)]


def _positive(value: Any) -> bool:
  return type(value) is int and value > 0


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  found = fields.get(name) or {}
  if not isinstance(found, Mapping):
    raise ModelFileError(f'config.json: {name} must be an object, got {str(found)[:80]}.')
  return found


def _flat_rope(family: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
  """The fields with `rope_parameters` of the layers that see all, where each kind has its own."""
  if family != 'gemma3_text':
    return fields
  nested = _object(fields, 'rope_parameters')
  return {**fields, 'rope_parameters': nested.get('full_attention')}


def _local_theta(family: str, fields: Mapping[str, Any]) -> Any:
  """theta of the layers with a window, None where they turn like the others."""
  if family != 'gemma3_text':
    return None
  rope = _object(_object(fields, 'rope_parameters'), 'sliding_attention')
  kind = rope.get('rope_type', 'default')
  if kind != 'default':
    raise ModelFileError(
      f'config.json: rope_type {kind!r} of sliding_attention is not supported, only default.'
    )
  return rope.get('rope_theta', fields['rope_local_base_freq'])


def _partial_rotary_factor(family: str, fields: Mapping[str, Any]) -> Any:
  rope = {**_object(fields, 'rope_scaling'), **_object(fields, 'rope_parameters')}
  factor = rope.get('partial_rotary_factor', fields.get('partial_rotary_factor', 1.0))
  if family != 'phi3' and factor != 1.0:
    raise ModelFileError(
      f'config.json: partial_rotary_factor={factor!r} of {family} is not supported, only 1.0.'
    )
  return factor


def _rope(fields: Mapping[str, Any]) -> tuple[Any, RopeScaling | None, Any]:
  """theta, scaling and context, from `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
  rope = {**_object(fields, 'rope_scaling'), **_object(fields, 'rope_parameters')}
  context = fields['max_position_embeddings']
  theta = rope.get('rope_theta', fields.get('rope_theta', 10000.0))
  kind = rope.get('rope_type', rope.get('type', 'default'))
  try:
    if kind == 'default':
      return theta, None, context
    if kind == 'linear':
      return theta, RopeScaling(kind='linear', factor=_required(rope, 'factor')), context
    if kind == 'llama3':
      scaling = RopeScaling(
        kind='llama3',
        factor=_required(rope, 'factor'),
        low_freq_factor=_required(rope, 'low_freq_factor'),
        high_freq_factor=_required(rope, 'high_freq_factor'),
        original_max_position=_required(rope, 'original_max_position_embeddings'),
      )
      return theta, scaling, context
    if kind in ('longrope', 'su'):
      return theta, *_longrope(fields, rope)
  except (ConfigError, TypeError) as error:
    raise ModelFileError(f'config.json: rope_scaling: {error}') from error
  raise ModelFileError(
    f'config.json: rope_type {kind!r} is not supported. Use default, linear, llama3 or longrope.'
  )


def _longrope(fields: Mapping[str, Any], rope: Mapping[str, Any]) -> tuple[RopeScaling, int]:
  """The factors of short texts, and the context up to which they hold."""
  short, long = _required(rope, 'short_factor'), _required(rope, 'long_factor')
  largest = fields['max_position_embeddings']
  original = fields.get('original_max_position_embeddings')
  original = rope.get('original_max_position_embeddings', largest) if original is None else original
  if not all(_positive(value) and value > 1 for value in (largest, original)):
    raise ModelFileError(
      'config.json: max_position_embeddings and original_max_position_embeddings must be whole '
      f'numbers above 1, got {largest!r} and {original!r}.'
    )
  given = {name: rope.get(name) for name in ('factor', 'attention_factor')}
  for name, value in given.items():
    if value is not None and (not isinstance(value, int | float) or not value > 0):
      raise ModelFileError(f'config.json: {name} of longrope must be above 0, got {value!r}.')
  attention_factor = given['attention_factor']
  if attention_factor is None:
    factor = largest / original if given['factor'] is None else given['factor']
    attention_factor = math.sqrt(1 + max(0.0, math.log(factor)) / math.log(original))
  scaling = RopeScaling(
    kind='factors', factors=tuple(short), attention_factor=float(attention_factor)
  )
  return scaling, largest if short == long else min(largest, original)
