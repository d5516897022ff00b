"""Hugging Face model directories: config.json and safetensors, in one file or sharded by an index.

Import checks every header against the config before anything large is allocated. Export writes
beside the target and renames, so that a directory that exists is whole; transformers loads it.
"""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from rlax_stack.errors import ModelFileError
from rlax_stack.models.assemble import assemble, check_shapes
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.hf_config import config_from_hf
from rlax_stack.models.hf_export import config_to_hf
from rlax_stack.models.json_file import read_json_object
from rlax_stack.models.layout import get_leaf, leaves
from rlax_stack.models.safetensors_reader import TensorEntry, read_header
from rlax_stack.models.stored_tensors import StoredTensor, split_entries, stored_tensors
from rlax_stack.models.tokenizer import Tokenizer

_CONFIG_LIMIT = 2**20  # bytes
_INDEX_LIMIT = 64 * 2**20
_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_SHARD_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors')
# Tensors of one file, at places of their leaves.
_Shard = list[tuple[StoredTensor, tuple[int, ...]]]
_FLOAT_NAMES = {'float32': 'float32', 'bfloat16': 'bfloat16', 'float16': 'float16'}


def load_hf(
  path: str | os.PathLike, *, dtype: Any = jnp.float32
) -> tuple[ModelConfig, dict[str, Any]]:
  """Reads a model directory.

  Args:
    path: holds config.json and model.safetensors, or model.safetensors.index.json and its shards.
    dtype: of the parameters.

  Returns: the config and the parameter tree (jax arrays, paths and shapes as in `layout.leaves`).

  Raises:
    ModelFileError: a missing, torn or hostile file, or tensors that do not fit the config; before
      anything of the model's size is allocated.
  """
  directory = pathlib.Path(path)
  config = read_hf_config(directory)
  entries = split_entries(config, _entries(directory))
  check_shapes(
    config,
    {name: entry.shape for name, entry in entries.items()},
    name_of=lambda leaf: leaf.hf_name,
    source=directory.name,
    # Tied models often carry their head once more; old ones their rotary frequencies.
    ignore=lambda name: (
      (name == 'lm_head.weight' and config.tie_embeddings) or name.endswith('rotary_emb.inv_freq')
    ),
  )
  params = assemble(
    config, lambda leaf, place: entries[leaf.hf_name.format(*place)].read(), dtype=dtype
  )
  return config, params


def read_hf_config(path: str | os.PathLike) -> ModelConfig:
  """The config of a model directory, from its config.json alone; raises as `load_hf`."""
  directory = pathlib.Path(path)
  if not directory.is_dir():
    raise ModelFileError(f'{directory}: no such model directory. Check the path.')
  return config_from_hf(
    read_json_object(_inside(directory, 'config.json'), size_limit=_CONFIG_LIMIT)
  )


def save_hf(
  path: str | os.PathLike,
  config: ModelConfig,
  params: Mapping[str, Any],
  *,
  tokenizer: Tokenizer | None = None,
  dtype: Any = None,
  max_shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a model directory that transformers loads.

  Args:
    path: the directory to make; it must not exist, or be empty.
    config: of the model.
    params: its parameter tree.
    tokenizer: written beside it where given.
    dtype: to cast to (float32, bfloat16 or float16); None keeps the leaves' own.
    max_shard_bytes: a file is at most this large, but for a single tensor above it.

  Raises:
    ModelFileError: `path` is taken, or the parameters do not fit the config.
  """
  target = pathlib.Path(path)
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise ModelFileError(f'{target}: exists already. Choose another directory, or remove it.')
  _check_params(config, params)
  dtype = np.dtype(get_leaf(params, ('embedder', 'embedding')).dtype if dtype is None else dtype)
  if dtype.name not in _FLOAT_NAMES:
    raise ModelFileError(f'dtype {dtype.name} cannot be exported. Use {", ".join(_FLOAT_NAMES)}.')
  partial = target.with_name(f'.{target.name}.partial')
  shutil.rmtree(partial, ignore_errors=True)  # left by a killed export
  partial.mkdir(parents=True)
  fields = {**config_to_hf(config), 'torch_dtype': _FLOAT_NAMES[dtype.name]}
  if tokenizer is not None:
    fields |= {'bos_token_id': tokenizer.bos_id, 'eos_token_id': tokenizer.eos_id}
    tokenizer.save(partial)
  _write_json(partial / 'config.json', fields)
  tensors = stored_tensors(config, fused=fields['model_type'] == 'phi3')
  plan = list(_plan_shards(config, tensors, dtype, max_shard_bytes))
  _write_shards(partial, plan, params, dtype)
  if target.exists():
    target.rmdir()
  partial.rename(target)


def _entries(directory: pathlib.Path) -> dict[str, TensorEntry]:
  """Every tensor of the directory, from one file or from the shards of an index."""
  if (directory / _INDEX).exists():
    return _indexed_entries(directory)
  if not (directory / _SINGLE).exists():
    raise ModelFileError(
      f'{directory}: neither {_SINGLE} nor {_INDEX}. Download the safetensors form of the model; '
      'other formats (.bin, .pth) can run code and are not read.'
    )
  return read_header(_inside(directory, _SINGLE))


def _indexed_entries(directory: pathlib.Path) -> dict[str, TensorEntry]:
  index = read_json_object(_inside(directory, _INDEX), size_limit=_INDEX_LIMIT)
  weight_map = index.get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise ModelFileError(f'{_INDEX}: weight_map is missing or empty. Download the file again.')
  for file in weight_map.values():
    if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
      raise ModelFileError(f'{_INDEX}: {file!r} is not the plain name of a .safetensors file.')
  result: dict[str, TensorEntry] = {}
  for file in sorted(set(weight_map.values())):
    for name, entry in read_header(_inside(directory, file)).items():
      if weight_map.get(name) != file:
        raise ModelFileError(
          f'{file}: holds {name}, which {_INDEX} places in {weight_map.get(name)!r}. '
          'Index and shards belong to different models.'
        )
      result[name] = entry
  for name, file in weight_map.items():
    if name not in result:
      raise ModelFileError(f'{_INDEX}: {file} holds no {name}. Download the file again.')
  return result


def _inside(directory: pathlib.Path, name: str) -> pathlib.Path:
  """The file `name` of the directory, refused where a link leads elsewhere.

  The download cache of Hugging Face links from snapshots/REVISION/ to blobs/ beside it; that is
  followed.
  """
  path = directory / name
  if path.is_symlink():
    parent = path.resolve().parent
    blobs = directory.resolve().parent.parent / 'blobs'
    if parent not in (directory.resolve(), blobs):
      raise ModelFileError(f'{path}: is a link out of the directory. Copy the file itself there.')
  return path


def _check_params(config: ModelConfig, params: Mapping[str, Any]) -> None:
  for leaf in leaves(config):
    name, expected = '/'.join(leaf.path), leaf.full_shape(config)
    try:
      shape = tuple(get_leaf(params, leaf.path).shape)
    except (KeyError, TypeError, AttributeError) as error:
      raise ModelFileError(f'parameter {name} of shape {expected} is missing.') from error
    if shape != expected:
      raise ModelFileError(f'parameter {name} has shape {shape}, the config says {expected}.')


def _write_shards(
  directory: pathlib.Path, plan: Sequence[_Shard], params: Mapping[str, Any], dtype: np.dtype
) -> None:
  weight_map, total = {}, 0
  for number, shard in enumerate(plan, start=1):
    file = _SINGLE if len(plan) == 1 else f'model-{number:05d}-of-{len(plan):05d}.safetensors'
    tensors = {}
    for tensor, place in shard:
      name = tensor.name.format(*place)
      parts = [get_leaf(params, part.path)[place] for part in tensor.parts]
      joined = parts[0] if len(parts) == 1 else np.concatenate([np.asarray(x) for x in parts])
      tensors[name] = np.ascontiguousarray(joined, dtype)
      weight_map[name] = file
      total += _bytes(tensor, dtype)
    save_file(tensors, directory / file, metadata={'format': 'pt'})
  if len(plan) > 1:
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    _write_json(directory / _INDEX, index)


def _plan_shards(
  config: ModelConfig, tensors: Sequence[StoredTensor], dtype: np.dtype, max_shard_bytes: int
) -> Iterator[_Shard]:
  """Tensors of each shard, filled in order."""
  shard, size = [], 0
  for tensor in tensors:
    needed = _bytes(tensor, dtype)
    for place in tensor.parts[0].places(config):
      if shard and size + needed > max_shard_bytes:
        yield shard
        shard, size = [], 0
      shard.append((tensor, place))
      size += needed
  yield shard


def _bytes(tensor: StoredTensor, dtype: np.dtype) -> int:
  return int(np.prod(tensor.shape)) * dtype.itemsize


def _write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(fields, indent=2) + '\n', encoding='utf-8')
