"""An adapter in PEFT's form: names, shapes and config by hand, and what has no such form."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlax_stack.errors import ConfigError, ModelFileError
from rlax_stack.models.adapter import AdapterSettings
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.peft import save_peft

CONFIG = ModelConfig(
  vocab_size=24,
  hidden_size=16,
  intermediate_size=20,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)
SETTINGS = AdapterSettings(kind='dora', rank=2, alpha=4.0, targets=('*/q_proj/*', '*down*'))


def _adapter():
  rng = np.random.default_rng(0)
  shapes = {
    'q_proj': {'lora_a': (2, 2, 16), 'lora_b': (2, 16, 2), 'magnitude': (2, 16)},
    'down_proj': {'lora_a': (2, 2, 20), 'lora_b': (2, 16, 2), 'magnitude': (2, 16)},
  }
  draw = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
  return {'layers': jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))}


def test_files_are_those_of_peft(tmp_path):
  adapter = _adapter()
  save_peft(tmp_path / 'out', CONFIG, adapter, SETTINGS, base_model='some/model')
  fields = json.loads((tmp_path / 'out' / 'adapter_config.json').read_text())
  assert fields['peft_type'] == 'LORA' and fields['base_model_name_or_path'] == 'some/model'
  assert (fields['r'], fields['lora_alpha']) == (2, 4.0)
  assert fields['use_dora'] is True and fields['use_rslora'] is False
  assert fields['target_modules'] == ['down_proj', 'q_proj']
  found = load_file(tmp_path / 'out' / 'adapter_model.safetensors')
  assert len(found) == 2 * 2 * 3
  stem = 'base_model.model.model.layers.1.'
  parts = adapter['layers']
  for name, want in (
    ('self_attn.q_proj.lora_A.weight', parts['q_proj']['lora_a'][1]),
    ('self_attn.q_proj.lora_magnitude_vector', parts['q_proj']['magnitude'][1]),
    ('mlp.down_proj.lora_B.weight', parts['down_proj']['lora_b'][1]),
  ):
    np.testing.assert_array_equal(found[stem + name], want)
  with pytest.raises(ModelFileError, match='exists already'):
    save_peft(tmp_path / 'out', CONFIG, adapter, SETTINGS, base_model='m')


def test_what_has_no_such_form(tmp_path):
  miss = dataclasses.replace(SETTINGS, kind='miss')
  with pytest.raises(ConfigError, match='kind miss is not written for PEFT'):
    save_peft(tmp_path / 'a', CONFIG, _adapter(), miss, base_model='m')
  phi = dataclasses.replace(CONFIG, partial_rotary_factor=0.5)
  with pytest.raises(ConfigError, match='phi3'):
    save_peft(tmp_path / 'a', phi, _adapter(), SETTINGS, base_model='m')
