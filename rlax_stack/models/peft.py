"""An adapter as a directory that Hugging Face's PEFT loads beside the model it belongs to.

For lora, rslora and dora, whose formulas are PEFT's own. Not for the merged model (hf.py). Writes beside the target and
renames, so that a directory that exists is whole.
"""

import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rlax_stack.errors import ConfigError, ModelFileError
from rlax_stack.models.adapter import AdapterSettings, adapted_leaves
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.hf_export import config_to_hf

# A leaf to what PEFT calls it; a magnitude is stored without '.weight'.
_NAMES = {
  'lora_a': 'lora_A.weight',
  'lora_b': 'lora_B.weight',
  'magnitude': 'lora_magnitude_vector',
}


def save_peft(
  path: str | os.PathLike,
  config: ModelConfig,
  adapter: Any,
  settings: AdapterSettings,
  *,
  base_model: str,
) -> None:
  """Writes adapter_config.json and adapter_model.safetensors, float32.

  Args:
    path: the directory to make; it must not exist, or be empty.
    config: shape of the model.
    adapter: tree of models/adapter.py.
    settings: of the adapter.
    base_model: path or name of the model, for adapter_config.json.

  Raises:
    ConfigError: an adapter or a model that PEFT has no such form of.
    ModelFileError: `path` is taken.
  """
  if settings.kind == 'miss':
    raise ConfigError('an adapter of kind miss is not written for PEFT. Export the merged model.')
  if config_to_hf(config)['model_type'] == 'phi3':
    raise ConfigError(
      'transformers joins the projections of phi3, so that PEFT has no place for this adapter. Export the merged model.'
    )
  target = pathlib.Path(path)
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise ModelFileError(f'{target}: exists already. Choose another directory, or remove it.')
  partial = target.with_name(f'.{target.name}.partial')
  shutil.rmtree(partial, ignore_errors=True)  # left by a killed export
  partial.mkdir(parents=True)
  tensors, modules = {}, set()
  for leaf in adapted_leaves(config, settings):
    parts = adapter['layers'][leaf.path[1]]
    for layer in range(config.num_layers):
      module = leaf.hf_name.format(layer).removesuffix('.weight')
      modules.add(module.rsplit('.', 1)[-1])
      for part, stacked in parts.items():
        tensors[f'base_model.model.{module}.{_NAMES[part]}'] = np.array(stacked[layer], np.float32)
  fields = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base_model,
    'r': settings.rank,
    'lora_alpha': settings.alpha,
    'use_rslora': settings.kind == 'rslora',
    'use_dora': settings.kind == 'dora',
    'target_modules': sorted(modules),
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
  }
  (partial / 'adapter_config.json').write_text(json.dumps(fields, indent=2) + '\n')
  save_file(tensors, partial / 'adapter_model.safetensors', metadata={'format': 'pt'})
  if target.exists():
    target.rmdir()
  partial.rename(target)
