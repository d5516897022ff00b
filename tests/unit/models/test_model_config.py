import dataclasses
import math

import numpy as np
import pytest

from rlax_stack.errors import ConfigError, ModelFileError
from rlax_stack.models.config import ModelConfig, RopeScaling
from rlax_stack.models.hf_config import config_from_hf, config_to_hf
from rlax_stack.models.rope import rope_factors, rope_inverse_frequencies

TINY = ModelConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
)
LLAMA3 = RopeScaling(kind='llama3', factor=8.0, original_max_position=64)
_MIXTRAL = {'num_experts': 4, 'experts_per_token': 2, 'moe_intermediate_size': 24}
_QWEN3_MOE = {
  'num_experts': 8,
  'experts_per_token': 3,
  'moe_intermediate_size': 12,
  'norm_topk_prob': False,
  'qk_norm': True,
}


@pytest.mark.parametrize(
  ('change', 'word'),
  [
    ({'vocab_size': 0}, 'vocab_size'),
    ({'hidden_size': 1.5}, 'hidden_size'),
    ({'num_layers': 10**6}, 'num_layers'),
    ({'num_kv_heads': 3}, 'num_kv_heads'),
    ({'head_dim': 5}, 'head_dim'),
    ({'rope_theta': math.nan}, 'rope_theta'),
    ({'rope_theta': 10**400}, 'rope_theta'),
    ({'rms_norm_eps': '1e-5'}, 'rms_norm_eps'),
    ({'tie_embeddings': 1}, 'tie_embeddings'),
    ({'sliding_window': 0}, 'sliding_window'),
    ({'rope_scaling': RopeScaling(kind='factors', factors=(1.0,))}, 'factors'),
  ],
)
def test_impossible_config_is_refused_by_name(change, word):
  with pytest.raises(ConfigError, match=word):
    dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
  'fields',
  [
    {'kind': 'yarn'},
    {'kind': 'linear', 'factor': 0.0},
    {'kind': 'llama3', 'low_freq_factor': 4.0},
    {'kind': 'factors'},
    {'kind': 'linear', 'factors': (1.0,)},
    {'kind': 'llama3', 'original_max_position': 0},
  ],
)
def test_impossible_scaling_is_refused(fields):
  with pytest.raises(ConfigError):
    RopeScaling(**fields)


@pytest.mark.parametrize(
  ('change', 'family'),
  [
    ({}, 'llama'),
    ({'rope_scaling': LLAMA3, 'tie_embeddings': False}, 'llama'),
    ({'rope_scaling': RopeScaling(kind='linear', factor=2.0)}, 'llama'),
    ({'rope_scaling': RopeScaling(kind='factors', factors=(1.0, 8.0))}, 'llama'),
    ({'sliding_window': 8}, 'mistral'),
    ({'attention_bias': True}, 'qwen2'),
    ({'attention_bias': True, 'sliding_window': 8}, 'qwen2'),
    ({'qk_norm': True, 'head_dim': 8, 'rope_theta': 1e6}, 'qwen3'),
    (_MIXTRAL, 'mixtral'),
    ({**_MIXTRAL, 'sliding_window': 8, 'rope_theta': 1e6}, 'mixtral'),
    (_QWEN3_MOE, 'qwen3_moe'),
    ({**_QWEN3_MOE, 'sliding_window': 8, 'norm_topk_prob': True}, 'qwen3_moe'),
  ],
)
def test_config_survives_hugging_face_and_back(change, family):
  config = dataclasses.replace(TINY, **change)
  fields = config_to_hf(config)
  assert fields['model_type'] == family
  assert config_from_hf(fields) == config


def test_new_rope_parameters_and_defaults():
  fields = {
    'model_type': 'qwen2',
    'vocab_size': 32,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_hidden_layers': 2,
    'num_attention_heads': 32,
    'head_dim': 4,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6},
  }
  config = config_from_hf(fields)
  assert config.rope_theta == 1e6
  assert config.rope_scaling is None
  assert config.num_kv_heads == 32
  assert config.sliding_window is None
  assert not config.tie_embeddings
  assert config.max_context == 32768


@pytest.mark.parametrize(
  ('change', 'word'),
  [
    ({'model_type': 'gpt2'}, 'gpt2'),
    ({'model_type': ['llama']}, 'not supported'),
    ({'hidden_act': 'gelu'}, 'hidden_act'),
    ({'attention_bias': True}, 'attention_bias'),
    ({'mlp_bias': True}, 'mlp_bias'),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0}}, 'yarn'),
    ({'rope_scaling': {'rope_type': 'llama3', 'factor': 2.0}}, 'low_freq_factor'),
    ({'rope_scaling': {'rope_type': 'linear', 'factor': 'x'}}, 'factor'),
    ({'rope_scaling': 3}, 'rope_scaling'),
    ({'hidden_size': None}, 'hidden_size'),
    ({'hidden_size': 18, 'head_dim': None}, 'hidden_size'),
    ({'vocab_size': 'many'}, 'vocab_size'),
    ({'num_key_value_heads': 3}, 'num_kv_heads'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config'),
  ],
)
def test_unsupported_hugging_face_field_is_refused(change, word):
  with pytest.raises(ModelFileError, match=word):
    config_from_hf({**config_to_hf(TINY), **change})


def test_mixed_attention_layers_are_refused():
  fields = config_to_hf(dataclasses.replace(TINY, qk_norm=True, sliding_window=8))
  with pytest.raises(ModelFileError, match='mixed'):
    config_from_hf({**fields, 'max_window_layers': 1})
  with pytest.raises(ModelFileError, match='max_window_layers'):
    config_from_hf({**fields, 'max_window_layers': 'x'})
  assert config_from_hf({**fields, 'max_window_layers': 2}).sliding_window is None
  layers = ['sliding_attention', 'sliding_attention']
  assert config_from_hf({**fields, 'layer_types': layers}).sliding_window == 8


def test_export_of_a_mixture_without_a_family_is_refused():
  config = dataclasses.replace(TINY, qk_norm=True, attention_bias=True)
  with pytest.raises(ModelFileError, match='no Hugging Face family'):
    config_to_hf(config)


@pytest.mark.parametrize(
  ('change', 'word'),
  [
    ({'decoder_sparse_step': 2}, 'decoder_sparse_step=2 .*all sparse'),
    ({'mlp_only_layers': [0]}, r'mlp_only_layers=\[0\] .*all sparse'),
    ({'num_experts_per_tok': 9}, 'experts_per_token must be at most num_experts'),
    ({'num_experts': 2.5}, 'num_experts must be a whole number'),
    ({'moe_intermediate_size': None}, 'moe_intermediate_size is missing'),
    ({'norm_topk_prob': 'yes'}, "norm_topk_prob must be True or False, got 'yes'"),
  ],
)
def test_mixtures_with_dense_layers_or_impossible_experts_are_refused(change, word):
  fields = config_to_hf(dataclasses.replace(TINY, **_QWEN3_MOE))
  with pytest.raises(ModelFileError, match=word):
    config_from_hf({**fields, **change})


def test_mixtures_read_what_transformers_leaves_out():
  fields = {
    'model_type': 'mixtral',
    'vocab_size': 32,
    'hidden_size': 32,
    'intermediate_size': 24,
    'num_hidden_layers': 2,
    'num_attention_heads': 8,
  }
  config = config_from_hf(fields)
  assert (config.num_experts, config.experts_per_token, config.moe_intermediate_size) == (8, 2, 24)
  assert config.norm_topk_prob and not config.qk_norm and config.sliding_window is None
  assert (config.rope_theta, config.rms_norm_eps) == (1e6, 1e-5)
  qwen = config_from_hf({**fields, 'model_type': 'qwen3_moe', 'num_local_experts': 16})
  assert (qwen.num_experts, qwen.experts_per_token, qwen.moe_intermediate_size) == (16, 8, 768)
  assert not qwen.norm_topk_prob and qwen.qk_norm and qwen.sliding_window is None


@pytest.mark.parametrize('change', [{'attention_bias': True}, {'norm_topk_prob': False}])
def test_export_of_a_mixture_of_experts_without_a_family_is_refused(change):
  with pytest.raises(ModelFileError, match='no Hugging Face family'):
    config_to_hf(dataclasses.replace(TINY, **_MIXTRAL, **change))


@pytest.mark.parametrize(
  ('change', 'word'),
  [
    ({'experts_per_token': 2}, 'belongs to a mixture of experts, got 2 with num_experts=0'),
    ({'num_experts': True}, 'num_experts'),
    ({'num_experts': 4}, 'experts_per_token'),
    ({**_MIXTRAL, 'num_experts': 5000}, 'num_experts must be a whole number from 1 to 4096'),
    ({**_MIXTRAL, 'experts_per_token': 5}, 'at most num_experts'),
  ],
)
def test_impossible_mixtures_are_refused(change, word):
  with pytest.raises(ConfigError, match=word):
    dataclasses.replace(TINY, **change)


def test_plain_and_linear_frequencies():
  config = dataclasses.replace(TINY, rope_theta=100.0)
  np.testing.assert_allclose(rope_inverse_frequencies(config), [1.0, 0.1], rtol=1e-7)
  config = dataclasses.replace(config, rope_scaling=RopeScaling(kind='linear', factor=4.0))
  np.testing.assert_allclose(rope_inverse_frequencies(config), [0.25, 0.025], rtol=1e-7)
  config = dataclasses.replace(config, rope_scaling=RopeScaling(kind='factors', factors=(1.0, 5.0)))
  np.testing.assert_allclose(rope_inverse_frequencies(config), [1.0, 0.02], rtol=1e-7)


def test_llama3_factors_at_both_ends_and_between():
  scaling = RopeScaling(kind='llama3', factor=8.0, original_max_position=100)
  # turns within 100 tokens: 10 (high, untouched), 0.5 (low, divided), 2.5 (half way between 1 and
  # 4)
  frequencies = np.array([10.0, 0.5, 2.5]) * 2 * math.pi / 100
  np.testing.assert_allclose(
    rope_factors(scaling, frequencies), [1.0, 8.0, 1 / (0.5 / 8 + 0.5)], rtol=1e-12
  )
