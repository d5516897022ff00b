import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models.config import RopeScaling
from rlax_stack.models.decoder import abstract_params
from rlax_stack.models.hf import load_hf, read_hf_config, save_hf
from rlax_stack.models.layout import get_leaf, leaves
from rlax_stack.models.safetensors_reader import read_header

_INDEX = 'model.safetensors.index.json'
_GEMMA = {
  'activation': 'gelu_tanh',
  'post_norms': True,
  'unit_offset_norms': True,
  'scale_embeddings': True,
  'sliding_window': 4,
  'global_layers': (1,),
}
_VARIANTS = [
  {},
  {'tie_embeddings': False, 'rope_scaling': RopeScaling(kind='llama3', factor=8.0)},
  {'sliding_window': 4, 'tie_embeddings': False},
  {'attention_bias': True},
  {'qk_norm': True, 'head_dim': 16},
  {'partial_rotary_factor': 0.5, 'sliding_window': 4},
  {**_GEMMA, 'attention_soft_cap': 50.0, 'final_soft_cap': 30.0, 'query_pre_attn_scalar': 4},
  {**_GEMMA, 'qk_norm': True, 'rope_theta': 1e6, 'local_rope_theta': 1e4},
  {'num_experts': 4, 'experts_per_token': 2, 'moe_intermediate_size': 64},
  {'num_experts': 3, 'experts_per_token': 1, 'moe_intermediate_size': 24, 'qk_norm': True},
]


@pytest.fixture
def saved(tmp_path, tiny_config, random_tree):
  """A directory of one model, in one file or in shards."""

  def run(*, max_shard_bytes=10**9, **change):
    config = dataclasses.replace(tiny_config, **change)
    tree = random_tree(config)
    save_hf(tmp_path / 'model', config, tree, max_shard_bytes=max_shard_bytes)
    return tmp_path / 'model', config, tree

  return run


@pytest.mark.parametrize('change', _VARIANTS)
def test_layout_is_that_of_the_decoder(tiny_config, change):
  config = dataclasses.replace(tiny_config, **change)
  abstract = abstract_params(config)
  assert len(jax.tree.leaves(abstract)) == len(leaves(config))
  for leaf in leaves(config):
    assert get_leaf(abstract, leaf.path).shape == leaf.full_shape(config)


@pytest.mark.parametrize('max_shard_bytes', [10**9, 20_000])
@pytest.mark.parametrize('change', _VARIANTS)
def test_model_survives_the_round_trip(saved, change, max_shard_bytes):
  path, config, tree = saved(max_shard_bytes=max_shard_bytes, **change)
  shards = sorted(path.glob('*.safetensors'))
  if max_shard_bytes == 20_000:
    assert len(shards) > 2
    assert all(shard.stat().st_size < 25_000 or len(read_header(shard)) == 1 for shard in shards)
  else:
    assert [shard.name for shard in shards] == ['model.safetensors']
  assert read_hf_config(path) == config
  loaded_config, params = load_hf(path)
  assert loaded_config == config
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
  jax.tree.map(np.testing.assert_array_equal, params, tree)


def test_bfloat16_files_are_read_as_float32(tmp_path, tiny_config, random_tree):
  tree = random_tree(tiny_config)
  save_hf(tmp_path / 'model', tiny_config, tree, dtype=ml_dtypes.bfloat16)
  assert json.loads((tmp_path / 'model/config.json').read_text())['torch_dtype'] == 'bfloat16'
  rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), tree)
  _, params = load_hf(tmp_path / 'model')
  jax.tree.map(np.testing.assert_array_equal, params, rounded)
  _, narrow = load_hf(tmp_path / 'model', dtype=jnp.bfloat16)
  assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}


def test_export_into_a_taken_directory_is_refused(saved, tiny_config, random_tree):
  path, config, tree = saved()
  with pytest.raises(ModelFileError, match='exists already'):
    save_hf(path, config, tree)
  with pytest.raises(ModelFileError, match='exists already'):
    save_hf(path / 'config.json', config, tree)
  assert [entry.name for entry in path.parent.iterdir()] == ['model']  # nothing half-written stays


def test_export_of_unfit_parameters_is_refused(tmp_path, tiny_config, random_tree):
  tree = random_tree(tiny_config)
  wide = dataclasses.replace(tiny_config, hidden_size=64)
  with pytest.raises(ModelFileError, match=r'embedder/embedding.*\(261, 32\).*\(261, 64\)'):
    save_hf(tmp_path / 'a', wide, tree)
  with pytest.raises(ModelFileError, match='lm_head/kernel.*missing'):
    save_hf(tmp_path / 'b', dataclasses.replace(tiny_config, tie_embeddings=False), tree)
  with pytest.raises(ModelFileError, match='int32'):
    save_hf(tmp_path / 'c', tiny_config, tree, dtype=np.int32)
  assert not list(tmp_path.iterdir())


def _edit_json(path, **change):
  fields = json.loads(path.read_text()) | change
  path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
  ('change', 'word'),
  [
    ({'intermediate_size': 96}, r'mlp.gate_proj.weight has shape \(64, 32\).*\(96, 32\)'),
    (
      {'num_hidden_layers': 3},
      r'model.layers.2.input_layernorm.weight of shape \(32,\) is missing',
    ),
    ({'num_hidden_layers': 1}, r'model.layers.1.* no place'),
    ({'tie_word_embeddings': False}, 'lm_head.weight.*tie_word_embeddings'),
    ({'vocab_size': 2**31 - 1}, 'embed_tokens'),
    ({'model_type': 'qwen3'}, 'q_norm'),
  ],
)
def test_weights_that_do_not_fit_the_config_are_refused_unallocated(
  saved, monkeypatch, change, word
):
  monkeypatch.setattr('rlax_stack.models.hf.assemble', None)
  path, _, _ = saved()
  _edit_json(path / 'config.json', **change)
  with pytest.raises(ModelFileError, match=word):
    load_hf(path)


def test_a_head_beside_tied_embeddings_is_passed_over(saved):
  path, _, tree = saved(tie_embeddings=False)
  _edit_json(path / 'config.json', tie_word_embeddings=True)
  config, params = load_hf(path)
  assert config.tie_embeddings
  assert 'lm_head' not in params
  np.testing.assert_array_equal(params['embedder']['embedding'], tree['embedder']['embedding'])


def test_biases_without_a_place_are_refused(saved):
  path, _, _ = saved(attention_bias=True)
  _edit_json(path / 'config.json', model_type='llama')
  with pytest.raises(ModelFileError, match='bias.*no place'):
    load_hf(path)


@pytest.mark.parametrize(
  'name', ['../model.safetensors', '/etc/passwd', 'a/b.safetensors', '..', 'model.bin', 7, '']
)
def test_index_names_that_leave_the_directory_are_refused(saved, name):
  path, _, _ = saved(max_shard_bytes=20_000)
  index = json.loads((path / _INDEX).read_text())
  index['weight_map']['model.norm.weight'] = name
  (path / _INDEX).write_text(json.dumps(index))
  with pytest.raises(ModelFileError, match='plain name'):
    load_hf(path)


def test_index_that_contradicts_its_shards_is_refused(saved):
  path, _, _ = saved(max_shard_bytes=20_000)
  good = json.loads((path / _INDEX).read_text())['weight_map']
  first = good['model.embed_tokens.weight']
  _edit_json(path / _INDEX, weight_map=good | {'model.norm.weight': first})
  with pytest.raises(ModelFileError, match='model.norm.weight'):
    load_hf(path)
  _edit_json(path / _INDEX, weight_map=good | {'model.more.weight': first})
  with pytest.raises(ModelFileError, match='holds no model.more.weight'):
    load_hf(path)
  _edit_json(path / _INDEX, weight_map={})
  with pytest.raises(ModelFileError, match='weight_map'):
    load_hf(path)
  _edit_json(path / _INDEX, weight_map=good)
  (path / first).unlink()
  with pytest.raises(ModelFileError, match='cannot be read'):
    load_hf(path)


def test_links_out_of_the_directory_are_refused(saved, tmp_path):
  path, _, _ = saved()
  weights = path / 'model.safetensors'
  weights.rename(tmp_path / 'elsewhere.safetensors')
  weights.symlink_to(tmp_path / 'elsewhere.safetensors')
  with pytest.raises(ModelFileError, match='link out of the directory'):
    load_hf(path)


def test_the_layout_of_the_download_cache_is_followed(saved, tmp_path):
  path, config, _ = saved()
  snapshot = tmp_path / 'cache/snapshots/0123'
  (tmp_path / 'cache/blobs').mkdir(parents=True)
  snapshot.mkdir(parents=True)
  for name in ('config.json', 'model.safetensors'):
    (path / name).rename(tmp_path / 'cache/blobs' / name)
    (snapshot / name).symlink_to(f'../../blobs/{name}')
  assert load_hf(snapshot)[0] == config


def test_missing_parts_are_named(tmp_path, saved):
  with pytest.raises(ModelFileError, match='no such model directory'):
    load_hf(tmp_path / 'nothing')
  path, _, _ = saved()
  (path / 'model.safetensors').unlink()
  with pytest.raises(ModelFileError, match='safetensors form'):
    load_hf(path)
  (path / 'config.json').unlink()
  with pytest.raises(ModelFileError, match=r'config.json: cannot be read'):
    load_hf(path)
