import dataclasses

import jax
import numpy as np
import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models.config import RopeScaling
from rlax_stack.models.gguf import describe_gguf, load_gguf, to_half_rotation
from rlax_stack.models.layout import get_leaf, leaves
from rlax_stack.models.rope import rope_factors


def _to_pairs(value, heads):
  """Half rotation to the interleaved order that the files of the llama architecture have."""
  halves = value.reshape(heads, 2, -1, *value.shape[1:])
  return halves.swapaxes(1, 2).reshape(value.shape)


def _tensors(config, tree, *, permuted):
  tensors = {}
  for leaf in leaves(config):
    heads = {'q_proj': config.num_heads, 'k_proj': config.num_kv_heads}.get(leaf.path[1])
    for layer in range(config.num_layers if leaf.stacked else 1):
      value = get_leaf(tree, leaf.path)
      value = value[layer] if leaf.stacked else value
      if heads and permuted:
        value = _to_pairs(value, heads)
      tensors[leaf.gguf_name.format(layer)] = 'F32', value.shape, value.tobytes()
  return tensors


@pytest.fixture
def write(tmp_path, gguf_bytes):
  def run(metadata, tensors):
    path = tmp_path / 'model.gguf'
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path

  return run


@pytest.mark.parametrize(
  ('family', 'change'),
  [
    ('llama', {}),
    ('llama', {'tie_embeddings': False, 'rope_theta': 500000.0}),
    ('qwen2', {'attention_bias': True}),
    ('qwen3', {'qk_norm': True, 'head_dim': 16}),
  ],
)
def test_model_comes_back(write, gguf_metadata, random_tree, tiny_config, family, change):
  config = dataclasses.replace(tiny_config, **change)
  tree = random_tree(config)
  path = write(gguf_metadata(config, family), _tensors(config, tree, permuted=family == 'llama'))
  model = load_gguf(path)
  assert model.config == config
  jax.tree.map(np.testing.assert_array_equal, model.params, tree)
  assert model.tokenizer.eos_id == 259
  described, tokenizer = describe_gguf(path)
  assert described == config
  assert tokenizer.vocab_size == 261
  assert model.chat_template == model.metadata['tokenizer.chat_template']


def test_half_rotation_order():
  value = np.arange(8)[:, None] * np.ones((1, 3))
  assert to_half_rotation(value, 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
  assert to_half_rotation(value, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama3_scaling_is_recognised(write, gguf_metadata, random_tree, tiny_config):
  scaling = RopeScaling(kind='llama3', factor=32.0)
  config = dataclasses.replace(
    tiny_config, rope_theta=500000.0, rope_scaling=scaling, head_dim=64, num_heads=1, num_kv_heads=1
  )
  frequencies = 500000.0 ** -(np.arange(0, 64, 2) / 64)
  factors = rope_factors(scaling, frequencies).astype(np.float32)
  assert factors.min() == 1.0
  assert 1.0 < np.median(factors) < 32.0
  tensors = _tensors(config, random_tree(config), permuted=True)
  tensors['rope_freqs.weight'] = 'F32', (32,), factors.tobytes()
  assert load_gguf(write(gguf_metadata(config), tensors)).config == config


def test_other_frequency_factors_are_kept(write, gguf_metadata, random_tree, tiny_config):
  tensors = _tensors(tiny_config, random_tree(tiny_config), permuted=True)
  factors = np.asarray([1.0, 1.5, 2.5, 7.25], np.float32)
  tensors['rope_freqs.weight'] = 'F32', (4,), factors.tobytes()
  scaling = load_gguf(write(gguf_metadata(tiny_config), tensors)).config.rope_scaling
  assert scaling == RopeScaling(kind='factors', factors=(1.0, 1.5, 2.5, 7.25))
  tensors['rope_freqs.weight'] = 'F32', (3,), factors[:3].tobytes()
  with pytest.raises(ModelFileError, match='factors'):
    load_gguf(write(gguf_metadata(tiny_config), tensors))


def test_linear_scaling_and_window(write, gguf_metadata, random_tree, tiny_config):
  tensors = _tensors(tiny_config, random_tree(tiny_config), permuted=True)
  metadata = gguf_metadata(tiny_config) | {
    'llama.rope.scaling.type': 'linear',
    'llama.rope.scaling.factor': 4.0,
    'llama.attention.sliding_window': 16,
  }
  config = load_gguf(write(metadata, tensors)).config
  assert config.rope_scaling == RopeScaling(kind='linear', factor=4.0)
  assert config.sliding_window == 16


@pytest.mark.parametrize(
  ('change', 'word'),
  [
    ({'general.architecture': 'mamba'}, 'mamba'),
    ({'llama.block_count': 3}, 'blk.2.attn_norm.weight'),
    ({'llama.block_count': 1}, 'blk.1'),
    ({'llama.feed_forward_length': 96}, 'ffn_gate'),
    ({'llama.attention.head_count': 5}, 'head_count'),
    ({'llama.attention.head_count': 'four'}, 'head_count'),
    ({'llama.expert_count': 8}, 'expert_count'),
    ({'llama.rope.scaling.type': 'yarn'}, 'yarn'),
    ({'llama.rope.dimension_count': 4}, 'dimension_count'),
    ({'tokenizer.ggml.model': 'llama'}, 'tokenizer model'),
    ({'tokenizer.ggml.pre': 'tekken'}, 'tekken'),
    ({'tokenizer.ggml.tokens': ['a', 'a']}, 'twice'),
    ({'tokenizer.ggml.token_type': np.asarray([1])}, 'token_type'),
    ({'tokenizer.ggml.merges': ['1 2 3']}, 'merge'),
    ({'tokenizer.ggml.merges': ['1 7']}, 'merge'),
    ({'tokenizer.ggml.merges': 5}, 'merges'),
    ({'tokenizer.ggml.eos_token_id': 9999}, 'eos_token_id'),
  ],
)
def test_metadata_that_does_not_fit_is_refused(
  write, gguf_metadata, random_tree, tiny_config, change, word
):
  tensors = _tensors(tiny_config, random_tree(tiny_config), permuted=True)
  with pytest.raises(ModelFileError, match=word):
    load_gguf(write(gguf_metadata(tiny_config) | change, tensors))


def test_unfit_tensors_are_refused_with_both_shapes(
  write, gguf_metadata, random_tree, tiny_config, monkeypatch
):
  monkeypatch.setattr('rlax_stack.models.gguf.assemble', None)  # nothing may be allocated
  tensors = _tensors(tiny_config, random_tree(tiny_config), permuted=True)
  bad = tensors | {'blk.1.ffn_up.weight': ('F32', (32, 64), bytes(8192))}
  with pytest.raises(ModelFileError, match=r'blk.1.ffn_up.weight.*\(32, 64\).*\(64, 32\)'):
    load_gguf(write(gguf_metadata(tiny_config), bad))
  bad = tensors | {'blk.0.attn_q.bias': ('F32', (32,), bytes(128))}
  with pytest.raises(ModelFileError, match='attn_q.bias.*no place'):
    load_gguf(write(gguf_metadata(tiny_config), bad))
  del tensors['token_embd.weight']
  with pytest.raises(ModelFileError, match='token_embd'):
    load_gguf(write(gguf_metadata(tiny_config), tensors))
