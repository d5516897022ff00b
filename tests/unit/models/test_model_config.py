import dataclasses
import math

import numpy as np
import pytest

from rlax_stack.errors import ConfigError, ModelFileError
from rlax_stack.models.config import LAYER_LIMIT, ModelConfig, RopeScaling
from rlax_stack.models.hf_config import config_from_hf
from rlax_stack.models.hf_export import config_to_hf
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
_GEMMA = {
  'activation': 'gelu_tanh',
  'post_norms': True,
  'unit_offset_norms': True,
  'scale_embeddings': True,
}
_MIXED = {'num_layers': 3, 'sliding_window': 8, 'global_layers': (1,)}
_LONG = RopeScaling(kind='factors', factors=(2.0,), attention_factor=1.2)
LLAMA3 = RopeScaling(kind='llama3', factor=8.0, original_max_position=64)


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
    ({'num_layers': LAYER_LIMIT + 1}, 'num_layers'),
    ({'sliding_window': 0}, 'sliding_window'),
    ({'partial_rotary_factor': 0.0}, 'partial_rotary_factor'),
    ({'partial_rotary_factor': 1.5}, 'partial_rotary_factor'),
    ({'partial_rotary_factor': 0.25}, 'even part of head_dim'),
    ({'partial_rotary_factor': 0.2}, 'even part of head_dim'),
    ({'query_pre_attn_scalar': 1.5}, 'query_pre_attn_scalar'),
    ({'query_pre_attn_scalar': 0}, 'query_pre_attn_scalar'),
    ({'attention_soft_cap': 0.0}, 'attention_soft_cap'),
    ({'final_soft_cap': -1.0}, 'final_soft_cap'),
    ({'final_soft_cap': math.inf}, 'final_soft_cap'),
    ({'activation': 'gelu'}, "activation must be one of.*'gelu_tanh'.*got 'gelu'"),
    ({'post_norms': 1}, 'post_norms'),
    ({'unit_offset_norms': None}, 'unit_offset_norms'),
    ({'scale_embeddings': 'yes'}, 'scale_embeddings'),
    ({'sliding_window': 4, 'global_layers': [1]}, 'must be a tuple'),
    ({'sliding_window': 4, 'global_layers': (True,)}, 'must be a tuple'),
    ({'sliding_window': 4, 'global_layers': (2,)}, 'from 0 to 1, got'),
    ({'sliding_window': 4, 'global_layers': (-1,)}, 'from 0 to 1, got'),
    ({'num_layers': 3, 'sliding_window': 4, 'global_layers': (1, 0)}, 'ascending'),
    ({'num_layers': 3, 'sliding_window': 4, 'global_layers': (1, 1)}, 'ascending'),
    ({'sliding_window': 4, 'global_layers': (0, 1)}, '2 of 2 layers'),
    ({'global_layers': (1,)}, 'sliding_window=None'),
    ({'local_rope_theta': 1e4}, 'Set rope_theta instead'),
    ({'sliding_window': 4, 'global_layers': (1,), 'local_rope_theta': 0.0}, 'local_rope_theta'),
    (
      {
        'partial_rotary_factor': 0.5,
        'rope_scaling': RopeScaling(kind='factors', factors=(1.0, 2.0)),
      },
      'self.rotary_dim=2',
    ),
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
    {'kind': 'factors', 'factors': (1.0,), 'attention_factor': 0.0},
    {'kind': 'linear', 'attention_factor': 1.5},
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
    ({'attention_bias': True, **_MIXED}, 'qwen2'),
    ({'qk_norm': True, 'head_dim': 8, 'rope_theta': 1e6}, 'qwen3'),
    ({'qk_norm': True, **_MIXED}, 'qwen3'),
    ({'partial_rotary_factor': 0.5}, 'phi3'),
    ({'partial_rotary_factor': 0.5, 'sliding_window': 8, 'rope_scaling': _LONG}, 'phi3'),
    (_GEMMA, 'gemma2'),
    ({**_GEMMA, 'sliding_window': 8}, 'gemma2'),
    (
      {
        **_GEMMA,
        **_MIXED,
        'attention_soft_cap': 50.0,
        'final_soft_cap': 30.0,
        'query_pre_attn_scalar': 7,
      },
      'gemma2',
    ),
    ({**_GEMMA, 'qk_norm': True}, 'gemma3_text'),
    ({**_GEMMA, 'qk_norm': True, 'sliding_window': 8, 'rope_theta': 1e6}, 'gemma3_text'),
    ({**_GEMMA, **_MIXED, 'qk_norm': True, 'final_soft_cap': 30.0}, 'gemma3_text'),
    (
      {
        **_GEMMA,
        **_MIXED,
        'qk_norm': True,
        'rope_theta': 1e6,
        'local_rope_theta': 1e4,
        'rope_scaling': RopeScaling(kind='linear', factor=8.0),
      },
      'gemma3_text',
    ),
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


def test_layers_with_and_without_a_window():
  fields = config_to_hf(dataclasses.replace(TINY, qk_norm=True, sliding_window=8))

  def read(**change):
    config = config_from_hf({**fields, **change})
    return config.sliding_window, config.global_layers

  assert read() == (8, ())
  assert read(max_window_layers=1) == (8, (0,))
  assert read(max_window_layers=2) == (None, ())
  assert read(layer_types=['sliding_attention', 'sliding_attention']) == (8, ())
  assert read(layer_types=['sliding_attention', 'full_attention']) == (8, (1,))
  refused = [
    ({'max_window_layers': 'x'}, 'max_window_layers'),
    ({'layer_types': 'full_attention'}, 'layer_types must be a list'),
    ({'layer_types': ['full_attention']}, 'layer_types are 1, but num_hidden_layers is 2'),
    ({'layer_types': ['full_attention', 'chunked_attention']}, "'chunked'"),
    ({'num_hidden_layers': 10**12}, 'num_hidden_layers'),
  ]
  for change, word in refused:
    with pytest.raises(ModelFileError, match=word):
      read(**change)


_SIZES = {
  'vocab_size': 32,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 12,
  'num_attention_heads': 4,
}


def test_gemma_by_its_defaults():
  two = config_from_hf({**_SIZES, 'model_type': 'gemma2'})
  assert (two.head_dim, two.num_kv_heads, two.sliding_window) == (256, 4, 4096)
  assert two.global_layers == (1, 3, 5, 7, 9, 11)
  assert (two.attention_soft_cap, two.final_soft_cap) == (50.0, 30.0)
  assert two.tie_embeddings and two.unit_offset_norms and two.post_norms and two.scale_embeddings
  assert (two.rope_theta, two.local_rope_theta, two.qk_norm) == (10000.0, None, False)
  assert two.attention_scale == 1 / 16
  three = config_from_hf({**_SIZES, 'model_type': 'gemma3_text'})
  assert three.global_layers == (5, 11)
  assert (three.rope_theta, three.local_rope_theta, three.qk_norm) == (1e6, 1e4, True)
  assert (three.attention_soft_cap, three.final_soft_cap) == (None, None)
  assert three.max_context == 131072
  wide = {**_SIZES, 'model_type': 'gemma2', 'query_pre_attn_scalar': 144}
  assert config_from_hf(wide).attention_scale == 1 / 12


def test_rotation_of_gemma_3_by_kind_of_layer():
  rope = {
    'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 5e5},
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 2e4},
  }
  fields = {**_SIZES, 'model_type': 'gemma3_text', 'rope_parameters': rope}
  config = config_from_hf(fields)
  assert (config.rope_theta, config.local_rope_theta) == (5e5, 2e4)
  assert config.rope_scaling == RopeScaling(kind='linear', factor=8.0)
  # Where no layer sees all, the theta of those with a window is the model's, and nothing is scaled.
  alone = config_from_hf({**fields, 'layer_types': ['sliding_attention'] * 12})
  assert (alone.rope_theta, alone.local_rope_theta, alone.rope_scaling) == (2e4, None, None)
  rope['sliding_attention']['rope_type'] = 'yarn'
  with pytest.raises(ModelFileError, match="'yarn' of sliding_attention"):
    config_from_hf(fields)


def test_phi_knows_long_texts_up_to_its_first_context():
  short, long = [1.0, 1.5], [3.0, 9.0]
  fields = {
    **_SIZES,
    'model_type': 'phi3',
    'head_dim': 8,
    'partial_rotary_factor': 0.5,
    'max_position_embeddings': 2048,
    'original_max_position_embeddings': 64,
    'sliding_window': 4096,
    'rope_scaling': {'type': 'longrope', 'short_factor': short, 'long_factor': long},
  }
  config = config_from_hf(fields)
  assert config.max_context == 64 and config.rotary_dim == 4
  assert config.sliding_window is None  # longer than any text
  assert config.rope_scaling.factors == (1.0, 1.5)
  expected = math.sqrt(1 + math.log(32) / math.log(64))
  assert config.rope_scaling.attention_factor == pytest.approx(expected)
  again = config_from_hf(config_to_hf(config))
  assert again == config
  same = {'type': 'longrope', 'short_factor': short, 'long_factor': short, 'attention_factor': 1.0}
  config = config_from_hf({**fields, 'rope_scaling': same})
  assert config.max_context == 2048 and config.rope_scaling.attention_factor == 1.0
  new = {**fields['rope_scaling'], 'rope_type': 'longrope', 'partial_rotary_factor': 0.5}
  modern = {k: v for k, v in fields.items() if k not in ('rope_scaling', 'partial_rotary_factor')}
  assert config_from_hf({**modern, 'rope_parameters': new}).rotary_dim == 4
  for change, word in (
    ({'attention_factor': 'x'}, 'attention_factor'),
    ({'factor': -2.0}, 'factor of longrope'),
    ({'short_factor': None}, 'short_factor'),
    ({'short_factor': [1.0]}, 'factors'),
  ):
    with pytest.raises(ModelFileError, match=word):
      config_from_hf({**fields, 'rope_scaling': {**fields['rope_scaling'], **change}})
  with pytest.raises(ModelFileError, match='original_max_position_embeddings'):
    config_from_hf({**fields, 'original_max_position_embeddings': 1})


@pytest.mark.parametrize(
  ('change', 'word'),
  [
    ({'hidden_activation': 'relu'}, 'hidden_activation'),
    ({'use_bidirectional_attention': True}, 'use_bidirectional_attention'),
    ({'attention_bias': True}, 'attention_bias'),
    ({'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping'),
    ({'query_pre_attn_scalar': 'x'}, 'query_pre_attn_scalar'),
    ({'sliding_window_pattern': 0}, 'sliding_window_pattern'),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 of gemma3_text'),
    ({'model_type': 'gemma3'}, "'gemma3' is not supported"),
  ],
)
def test_unsupported_field_of_gemma_is_refused(change, word):
  with pytest.raises(ModelFileError, match=word):
    config_from_hf({**_SIZES, 'model_type': 'gemma3_text', **change})


@pytest.mark.parametrize(
  'change',
  [
    {'qk_norm': True, 'attention_bias': True},
    {'post_norms': True},
    {'attention_soft_cap': 3.0},
    {'query_pre_attn_scalar': 3},
    _MIXED,
    {'partial_rotary_factor': 0.5, 'qk_norm': True},
    {**_GEMMA, 'qk_norm': True, 'attention_soft_cap': 3.0},
    {**_GEMMA, **_MIXED, 'local_rope_theta': 3.0},
  ],
)
def test_export_of_a_mixture_without_a_family_is_refused(change):
  with pytest.raises(ModelFileError, match=f'no Hugging Face family .*{sorted(change)[-1]}'):
    config_to_hf(dataclasses.replace(TINY, **change))


def test_export_of_scaling_that_a_family_does_not_know_is_refused():
  linear = RopeScaling(kind='linear', factor=8.0)
  phi = dataclasses.replace(TINY, partial_rotary_factor=0.5, rope_scaling=linear)
  with pytest.raises(ModelFileError, match="'linear' together with partial_rotary_factor"):
    config_to_hf(phi)
  gemma = dataclasses.replace(TINY, **_GEMMA, qk_norm=True, sliding_window=8, rope_scaling=linear)
  with pytest.raises(ModelFileError, match='Set local_rope_theta'):
    config_to_hf(gemma)


def test_plain_and_linear_frequencies():
  config = dataclasses.replace(TINY, rope_theta=100.0)
  np.testing.assert_allclose(rope_inverse_frequencies(config), [1.0, 0.1], rtol=1e-7)
  config = dataclasses.replace(config, rope_scaling=RopeScaling(kind='linear', factor=4.0))
  np.testing.assert_allclose(rope_inverse_frequencies(config), [0.25, 0.025], rtol=1e-7)
  config = dataclasses.replace(config, rope_scaling=RopeScaling(kind='factors', factors=(1.0, 5.0)))
  np.testing.assert_allclose(rope_inverse_frequencies(config), [1.0, 0.02], rtol=1e-7)


def test_frequencies_of_a_part_of_the_head_and_of_local_layers():
  config = dataclasses.replace(TINY, head_dim=8, partial_rotary_factor=0.5, rope_theta=100.0)
  np.testing.assert_allclose(rope_inverse_frequencies(config), [1.0, 0.1], rtol=1e-7)
  scaling = RopeScaling(kind='linear', factor=4.0)
  fields = {'rope_theta': 100.0, 'local_rope_theta': 25.0, 'rope_scaling': scaling}
  config = dataclasses.replace(TINY, **_MIXED, **fields)
  np.testing.assert_allclose(rope_inverse_frequencies(config), [0.25, 0.025], rtol=1e-7)
  np.testing.assert_allclose(rope_inverse_frequencies(config, local=True), [1.0, 0.2], rtol=1e-7)


def test_llama3_factors_at_both_ends_and_between():
  scaling = RopeScaling(kind='llama3', factor=8.0, original_max_position=100)
  # turns within 100 tokens: 10 (high, untouched), 0.5 (low, divided), 2.5 (half way between 1 and
  # 4)
  frequencies = np.array([10.0, 0.5, 2.5]) * 2 * math.pi / 100
  np.testing.assert_allclose(
    rope_factors(scaling, frequencies), [1.0, 8.0, 1 / (0.5 / 8 + 0.5)], rtol=1e-12
  )
