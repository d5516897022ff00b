"""`ModelConfig` to the `config.json` of a family that transformers has; the way back is `hf_config.py`.

A family is the first of the table whose required features the config has, and that knows all the others it has.
"""

import dataclasses
from typing import Any, NamedTuple

from rlax_stack.errors import ModelFileError
from rlax_stack.models.config import ModelConfig


class _Family(NamedTuple):
  """Fields of ModelConfig that must differ from their defaults, and those that may."""

  architecture: str
  requires: frozenset[str]
  knows: frozenset[str]


def _family(architecture: str, requires: str, knows: str = '') -> _Family:
  required = frozenset(requires.split())
  return _Family(architecture, required, required | frozenset(knows.split()))


_GEMMA = 'activation post_norms unit_offset_norms scale_embeddings'
_GEMMA_MAY = 'sliding_window global_layers query_pre_attn_scalar final_soft_cap'
_FAMILIES = {
  'llama': _family('LlamaForCausalLM', ''),
  'mistral': _family('MistralForCausalLM', 'sliding_window'),
  'qwen2': _family('Qwen2ForCausalLM', 'attention_bias', 'sliding_window global_layers'),
  'qwen3': _family('Qwen3ForCausalLM', 'qk_norm', 'sliding_window global_layers'),
  'mixtral': _family('MixtralForCausalLM', 'num_experts', 'sliding_window'),
  'qwen3_moe': _family(
    'Qwen3MoeForCausalLM', 'num_experts qk_norm', 'sliding_window norm_topk_prob'
  ),
  'phi3': _family('Phi3ForCausalLM', 'partial_rotary_factor', 'sliding_window'),
  'gemma2': _family('Gemma2ForCausalLM', _GEMMA, f'{_GEMMA_MAY} attention_soft_cap'),
  'gemma3_text': _family(
    'Gemma3ForCausalLM', f'{_GEMMA} qk_norm', f'{_GEMMA_MAY} local_rope_theta'
  ),
}
_FEATURES = frozenset().union(*(family.knows for family in _FAMILIES.values()))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """The fields of a `config.json` that transformers loads as the same model.

  Raises:
    ModelFileError: a mixture of features that no family of transformers has.
  """
  name = _family_of(config)
  fields = {
    'architectures': [_FAMILIES[name].architecture],
    'model_type': name,
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
  if name == 'llama':
    return {**fields, 'attention_bias': False, 'mlp_bias': False}
  fields['sliding_window'] = config.sliding_window
  if name in ('qwen2', 'qwen3'):
    fields |= _qwen(config)
  if name.startswith('qwen3'):
    fields['attention_bias'] = False
  if config.num_experts:
    fields |= _experts(name, config)
  if name == 'phi3':
    fields |= _phi(config)
  if name.startswith('gemma'):
    fields |= _gemma(config)
  if name == 'gemma3_text':
    fields |= _local_rope(config)
  return fields


def _family_of(config: ModelConfig) -> str:
  features = {
    field.name
    for field in dataclasses.fields(config)
    if field.name in _FEATURES and getattr(config, field.name) != field.default
  }
  for name, family in _FAMILIES.items():
    if family.requires <= features <= family.knows:
      return name
  raise ModelFileError(
    f'no Hugging Face family has just these features: {", ".join(sorted(features))}. Only a model '
    'of one family can be exported.'
  )


def _layer_types(config: ModelConfig) -> list[str]:
  whole = range(config.num_layers) if config.sliding_window is None else config.global_layers
  kinds = ('sliding_attention', 'full_attention')
  return [kinds[layer in whole] for layer in range(config.num_layers)]


def _qwen(config: ModelConfig) -> dict[str, Any]:
  count, layers = config.num_layers, config.global_layers
  sliding = config.sliding_window is not None
  fields = {
    'use_sliding_window': sliding,
    'max_window_layers': len(layers) if sliding else count,
  }
  return {**fields, 'layer_types': _layer_types(config)} if layers else fields


def _experts(name: str, config: ModelConfig) -> dict[str, Any]:
  if name == 'mixtral':
    return {
      'intermediate_size': config.moe_intermediate_size,
      'num_local_experts': config.num_experts,
      'num_experts_per_tok': config.experts_per_token,
    }
  return {
    'use_sliding_window': config.sliding_window is not None,
    'num_experts': config.num_experts,
    'num_experts_per_tok': config.experts_per_token,
    'moe_intermediate_size': config.moe_intermediate_size,
    'norm_topk_prob': config.norm_topk_prob,
    'decoder_sparse_step': 1,
    'mlp_only_layers': [],
  }


def _phi(config: ModelConfig) -> dict[str, Any]:
  if config.rope_scaling is not None and config.rope_scaling.kind != 'factors':
    raise ModelFileError(
      f'rotary scaling {config.rope_scaling.kind!r} together with partial_rotary_factor has no '
      'Hugging Face family, so that the model cannot be exported.'
    )
  return {
    'partial_rotary_factor': config.partial_rotary_factor,
    'original_max_position_embeddings': config.max_context,
    # Those of Phi3Config are outside a smaller vocabulary.
    **dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id')),
  }


def _gemma(config: ModelConfig) -> dict[str, Any]:
  return {
    'hidden_act': 'gelu_pytorch_tanh',
    'hidden_activation': 'gelu_pytorch_tanh',
    'attention_bias': False,
    # transformers wants a window even where no layer has one.
    'sliding_window': config.sliding_window or config.max_context,
    'layer_types': _layer_types(config),
    'query_pre_attn_scalar': config.query_pre_attn_scalar or config.head_dim,
    'attn_logit_softcapping': config.attention_soft_cap,
    'final_logit_softcapping': config.final_soft_cap,
  }


def _local_rope(config: ModelConfig) -> dict[str, Any]:
  """theta of the layers with a window, which Gemma 3 never scales."""
  local = config.local_rope_theta
  if local is None and config.sliding_window is not None:
    if config.rope_scaling is not None:
      raise ModelFileError(
        f'rotary scaling {config.rope_scaling.kind!r} of layers with a sliding_window has no place '
        'in Gemma 3. Set local_rope_theta for layers that are not scaled.'
      )
    local = config.rope_theta
  return {} if local is None else {'rope_local_base_freq': local}


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
    'attention_factor': scaling.attention_factor,
    'long_factor': list(scaling.factors),
    'short_factor': list(scaling.factors),
    'original_max_position_embeddings': config.max_context,
  }
