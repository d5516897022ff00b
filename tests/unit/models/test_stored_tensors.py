"""Fused matrices of Phi-3 files: which tensors there are, and that each leaf gets its own rows."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlax_stack.errors import ModelFileError
from rlax_stack.models.hf import load_hf, save_hf
from rlax_stack.models.layout import leaves
from rlax_stack.models.safetensors_reader import read_header
from rlax_stack.models.stored_tensors import StoredTensor, split_entries, stored_tensors


@pytest.fixture
def phi(tiny_config):
  return dataclasses.replace(tiny_config, partial_rotary_factor=0.5, tie_embeddings=False)


def test_every_leaf_is_stored_once(phi):
  alone = stored_tensors(phi, fused=False)
  assert [t.parts for t in alone] == [(leaf,) for leaf in leaves(phi)]
  assert all(isinstance(t, StoredTensor) and t.shape == t.parts[0].shape for t in alone)
  fused = {t.name: t for t in stored_tensors(phi, fused=True)}
  assert sorted(leaf.path for t in fused.values() for leaf in t.parts) == sorted(
    leaf.path for leaf in leaves(phi)
  )
  qkv = fused['model.layers.{}.self_attn.qkv_proj.weight']
  assert [leaf.path[1] for leaf in qkv.parts] == ['q_proj', 'k_proj', 'v_proj']
  assert qkv.shape == (32 + 16 + 16, 32)
  assert fused['model.layers.{}.mlp.gate_up_proj.weight'].shape == (128, 32)
  assert 'model.layers.{}.self_attn.q_proj.weight' not in fused


@pytest.mark.parametrize('max_shard_bytes', [10**9, 20_000])
def test_fused_files_are_the_rows_of_the_leaves(tmp_path, phi, random_tree, max_shard_bytes):
  tree = random_tree(phi)
  save_hf(tmp_path / 'model', phi, tree, max_shard_bytes=max_shard_bytes)
  stored = {}
  for shard in (tmp_path / 'model').glob('*.safetensors'):
    stored |= load_file(shard)
  layers = tree['layers']
  for layer in range(phi.num_layers):
    name = f'model.layers.{layer}'
    want = np.concatenate([layers[f'{n}_proj']['kernel'][layer] for n in 'qkv'])
    np.testing.assert_array_equal(stored[f'{name}.self_attn.qkv_proj.weight'], want)
    want = np.concatenate([layers[f'{n}_proj']['kernel'][layer] for n in ('gate', 'up')])
    np.testing.assert_array_equal(stored[f'{name}.mlp.gate_up_proj.weight'], want)
  config, params = load_hf(tmp_path / 'model')
  assert config == phi
  jax.tree.map(np.testing.assert_array_equal, params, tree)


def test_entries_of_the_parts_lie_one_after_the_other(tmp_path, phi, random_tree):
  save_hf(tmp_path / 'model', phi, random_tree(phi))
  header = read_header(tmp_path / 'model/model.safetensors')
  entries = split_entries(phi, header)
  whole = header['model.layers.1.self_attn.qkv_proj.weight']
  q, k, v = (entries[f'model.layers.1.self_attn.{n}_proj.weight'] for n in 'qkv')
  assert (q.start, q.stop, k.stop, v.stop) == (whole.start, k.start, v.start, whole.stop)
  assert (q.shape, k.shape, v.shape) == ((32, 32), (16, 32), (16, 32))
  np.testing.assert_array_equal(np.concatenate([q.read(), k.read(), v.read()]), whole.read())
  assert whole.name not in entries


def test_a_model_without_partial_rotation_may_be_fused_too(tmp_path, phi, random_tree):
  """Phi-4 turns whole heads: it is read from fused matrices and is a Llama in all but name."""
  tree = random_tree(phi)
  save_hf(tmp_path / 'model', phi, tree)
  path = tmp_path / 'model/config.json'
  fields = json.loads(path.read_text())
  del fields['partial_rotary_factor']
  path.write_text(json.dumps(fields))
  config, params = load_hf(tmp_path / 'model')
  assert config == dataclasses.replace(phi, partial_rotary_factor=1.0)
  jax.tree.map(np.testing.assert_array_equal, params, tree)
  save_hf(tmp_path / 'again', config, params)
  assert load_hf(tmp_path / 'again')[0] == config


def test_a_fused_matrix_of_another_shape_is_refused(tmp_path, phi, random_tree):
  save_hf(tmp_path / 'model', phi, random_tree(phi))
  path = tmp_path / 'model/model.safetensors'
  tensors = load_file(path)
  name = 'model.layers.0.self_attn.qkv_proj.weight'
  save_file({**tensors, name: tensors[name][:-1]}, path)
  with pytest.raises(ModelFileError, match=r'qkv_proj.weight has shape \(63, 32\).*\(64, 32\)'):
    load_hf(tmp_path / 'model')


def test_a_part_that_is_stored_twice_is_refused(tmp_path, phi, random_tree):
  tree = random_tree(phi)
  save_hf(tmp_path / 'model', phi, tree)
  path = tmp_path / 'model/model.safetensors'
  extra = {'model.layers.0.self_attn.q_proj.weight': tree['layers']['q_proj']['kernel'][0]}
  save_file({**load_file(path), **extra}, path)
  with pytest.raises(ModelFileError, match='q_proj.weight is stored twice'):
    load_hf(tmp_path / 'model')
