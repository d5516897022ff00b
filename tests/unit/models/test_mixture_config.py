"""Shapes of mixtures of experts, to and from Hugging Face; those of dense models are in test_model_config.py."""

import dataclasses

import pytest

from rlax_stack.errors import ConfigError, ModelFileError
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.hf_config import config_from_hf
from rlax_stack.models.hf_export import config_to_hf

TINY = ModelConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
)
_MIXTRAL = {'num_experts': 4, 'experts_per_token': 2, 'moe_intermediate_size': 24}
_QWEN3_MOE = {
  'num_experts': 8,
  'experts_per_token': 3,
  'moe_intermediate_size': 12,
  'norm_topk_prob': False,
  'qk_norm': True,
}


@pytest.mark.parametrize(
  ('change', 'family'),
  [
    (_MIXTRAL, 'mixtral'),
    ({**_MIXTRAL, 'sliding_window': 8, 'rope_theta': 1e6}, 'mixtral'),
    (_QWEN3_MOE, 'qwen3_moe'),
    ({**_QWEN3_MOE, 'sliding_window': 8, 'norm_topk_prob': True}, 'qwen3_moe'),
  ],
)
def test_mixture_survives_hugging_face_and_back(change, family):
  config = dataclasses.replace(TINY, **change)
  fields = config_to_hf(config)
  assert fields['model_type'] == family
  assert config_from_hf(fields) == config


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
