"""Every family against transformers on torch: tiny random models, both ways through the files.

Runs in an environment of its own (`make parity`); torch is no dependency of the project.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models.config import RopeScaling
from rlax_stack.models.decoder import capped, hidden_states, lm_head
from rlax_stack.models.hf import load_hf, save_hf
from rlax_stack.pallas_kernels.tree_attention import AttentionShape, prepare_tree_attention

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings('ignore')]

_SHAPE = {
  'vocab_size': 96,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 256,
  'initializer_range': 0.3,  # wide enough for sharp attention and logits of the size of real ones
  'bos_token_id': None,
  'eos_token_id': None,
  'pad_token_id': None,
}
_LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 500000.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
_PARTIAL = {'rope_type': 'default', 'rope_theta': 1000.0, 'partial_rotary_factor': 0.5}
_GEMMA = {'head_dim': 16, 'sliding_window': 7, 'query_pre_attn_scalar': 16, 'pad_token_id': 0}
_FAMILIES = {
  'llama3': ('LlamaConfig', {'rope_parameters': _LLAMA3, 'tie_word_embeddings': False}),
  'llama-linear': (
    'LlamaConfig',
    {'rope_parameters': {'rope_type': 'linear', 'rope_theta': 10000.0, 'factor': 4.0}},
  ),
  'smollm2': (
    'LlamaConfig',
    {
      'tie_word_embeddings': True,
      'num_attention_heads': 3,
      'num_key_value_heads': 1,
      'hidden_size': 48,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 100000.0},
    },
  ),
  'mistral': ('MistralConfig', {'sliding_window': 7}),
  'qwen2': ('Qwen2Config', {'tie_word_embeddings': True}),
  'qwen3': ('Qwen3Config', {'head_dim': 16, 'tie_word_embeddings': True, 'rms_norm_eps': 1e-6}),
  'qwen2-windows': (
    'Qwen2Config',
    {'use_sliding_window': True, 'sliding_window': 7, 'max_window_layers': 1},
  ),
  'phi3': ('Phi3Config', {}),
  'phi3-partial': ('Phi3Config', {'rope_parameters': _PARTIAL, 'sliding_window': 7}),
  'phi3-long': (
    'Phi3Config',
    {
      'original_max_position_embeddings': 64,
      'rope_parameters': {
        **_PARTIAL,
        'rope_type': 'longrope',
        'short_factor': [1.0, 1.5],
        'long_factor': [4.0, 9.0],
      },
    },
  ),
  'gemma2': (
    'Gemma2Config',
    {
      **_GEMMA,
      'query_pre_attn_scalar': 24,
      'attn_logit_softcapping': 5.0,
      'final_logit_softcapping': 8.0,
    },
  ),
  'gemma2-plain': (
    'Gemma2Config',
    {**_GEMMA, 'attn_logit_softcapping': None, 'final_logit_softcapping': None},
  ),
  'gemma3': (
    'Gemma3TextConfig',
    {
      **_GEMMA,
      'num_hidden_layers': 7,
      'initializer_range': 0.2,
      'rope_parameters': {
        'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6},
        'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
      },
    },
  ),
  'gemma3-local': ('Gemma3TextConfig', {**_GEMMA, 'final_logit_softcapping': 8.0}),
  'mixtral': ('MixtralConfig', {'num_local_experts': 6, 'num_experts_per_tok': 2}),
  'qwen3-moe': (
    'Qwen3MoeConfig',
    {
      'head_dim': 16,
      'num_experts': 8,
      'num_experts_per_tok': 3,
      'moe_intermediate_size': 24,
      'norm_topk_prob': False,
    },
  ),
  'qwen3-moe-normalised': (
    'Qwen3MoeConfig',
    {
      'num_experts': 4,
      'moe_intermediate_size': 24,
      'num_experts_per_tok': 2,
      'norm_topk_prob': True,
    },
  ),
}
_LENGTH, _PROMPT = 40, 8


def _reference(name):
  config_class, fields = _FAMILIES[name]
  config = getattr(transformers, config_class)(**{**_SHAPE, **fields})
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager')
  with torch.no_grad():  # biases and norms start at 0 and 1, where an error would not show
    for path, parameter in model.named_parameters():
      if parameter.ndim == 1:
        parameter.add_(0.3 * torch.randn_like(parameter))
      if name.startswith('gemma') and '.post_' in path:
        parameter.add_(3.0)  # else a token's scaled embedding is all that counts
  return model.eval()


def _logits_of_reference(model, tokens):
  with torch.no_grad():
    return model(torch.from_numpy(tokens).long()).logits.numpy()


def _make_logits(config):
  @jax.jit
  def logits(params, tokens):
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    ends = jnp.full((rows, length), length, jnp.int32)

    attend = prepare_tree_attention(
      positions,
      ends,
      shape=AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, jnp.float32),
      window=config.sliding_window,
      mixed=bool(config.global_layers),
      scale=config.attention_scale,
      soft_cap=config.attention_soft_cap,
    )
    hidden = hidden_states(params, config, tokens, positions, attend)
    return capped(config, jnp.einsum('rtd,vd->rtv', hidden, lm_head(params, config)))

  return logits


@pytest.fixture(scope='module', params=_FAMILIES)
def family(request, tmp_path_factory):
  """The reference model, its directory, and ours loaded from it."""
  model = _reference(request.param)
  path = tmp_path_factory.mktemp(request.param) / 'model'
  model.save_pretrained(path)
  config, params = load_hf(path)
  return types.SimpleNamespace(
    model=model, path=path, config=config, params=params, logits=_make_logits(config)
  )


def _tokens(config, seed):
  return np.random.default_rng(seed).integers(0, config.vocab_size, (2, _LENGTH), np.int32)


def _load_in_transformers(path):
  return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation='eager').eval()


def test_import_gives_the_logits_of_transformers(family):
  tokens = _tokens(family.config, 0)
  expected = _logits_of_reference(family.model, tokens)
  np.testing.assert_allclose(family.logits(family.params, tokens), expected, atol=1e-4, rtol=0)


def test_greedy_continuation_is_equal_token_for_token(family):
  tokens = np.zeros((2, _LENGTH), np.int32)
  tokens[0, :_PROMPT] = _tokens(family.config, 1)[0, :_PROMPT]
  prompt = torch.from_numpy(tokens[:1, :_PROMPT]).long()
  with torch.no_grad():
    expected = family.model.generate(
      prompt, max_new_tokens=_LENGTH - _PROMPT, min_new_tokens=_LENGTH - _PROMPT, do_sample=False
    )
  for index in range(_PROMPT, _LENGTH):
    tokens[0, index] = int(jnp.argmax(family.logits(family.params, tokens)[0, index - 1]))
  assert tokens[0].tolist() == expected[0].tolist()
  assert len(set(tokens[0, _PROMPT:].tolist())) > 4  # not one token over and over


def test_sharded_import_is_the_same_model(family, tmp_path):
  family.model.save_pretrained(tmp_path, max_shard_size='20KB')
  assert (tmp_path / 'model.safetensors.index.json').exists()
  config, params = load_hf(tmp_path)
  assert config == family.config
  jax.tree.map(np.testing.assert_array_equal, params, family.params)


@pytest.mark.parametrize('max_shard_bytes', [10**9, 20_000])
def test_export_loads_in_transformers_with_the_same_logits(family, tmp_path, max_shard_bytes):
  path = tmp_path / 'export'
  save_hf(path, family.config, family.params, max_shard_bytes=max_shard_bytes)
  exported = _load_in_transformers(path)
  tokens = _tokens(family.config, 0)
  expected = _logits_of_reference(family.model, tokens)
  got = _logits_of_reference(exported, tokens)
  # A Phi without partial rotation is written as a Llama, whose separate products round otherwise.
  same_form = exported.config.model_type == family.model.config.model_type
  np.testing.assert_allclose(got, expected, atol=1e-6 if same_form else 1e-5, rtol=0)
  np.testing.assert_allclose(got, family.logits(family.params, tokens), atol=1e-4, rtol=0)


def test_explicit_frequency_factors_export_as_longrope(tmp_path):
  model = _reference('smollm2')
  model.save_pretrained(tmp_path / 'model')
  config, params = load_hf(tmp_path / 'model')
  factors = tuple(np.linspace(1.0, 9.0, config.head_dim // 2).tolist())
  config = dataclasses.replace(config, rope_scaling=RopeScaling(kind='factors', factors=factors))
  save_hf(tmp_path / 'export', config, params)
  assert load_hf(tmp_path / 'export')[0] == config
  tokens = _tokens(config, 2)
  ours = _make_logits(config)(params, tokens)
  exported = _load_in_transformers(tmp_path / 'export')
  np.testing.assert_allclose(_logits_of_reference(exported, tokens), ours, atol=1e-4, rtol=0)
  assert np.abs(_logits_of_reference(model, tokens) - ours).max() > 0.1
