"""Which leaves of the tree lie together in one tensor of a Hugging Face file.

Phi-3 stores queries, keys and values as one matrix, and gate and up as another: the rows of the one after those of the
other. All others store every leaf by itself. Not for reading or writing (`hf.py`).
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from rlax_stack.errors import ModelFileError
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.layout import Leaf, leaves
from rlax_stack.models.safetensors_reader import TensorEntry

_FUSED = {
  'self_attn.qkv_proj': ('q_proj', 'k_proj', 'v_proj'),
  'mlp.gate_up_proj': ('gate_proj', 'up_proj'),
}


class StoredTensor(NamedTuple):
  """One tensor of a file, per layer where its leaves are stacked."""

  name: str  # `{}` is the number of the layer
  parts: tuple[Leaf, ...]  # one after the other along the first axis
  shape: tuple[int, ...]


def stored_tensors(config: ModelConfig, *, fused: bool) -> list[StoredTensor]:
  """Every tensor of a file of `config`, embedding first; `fused` as Phi-3 stores them."""
  names = {leaf.path[-2:]: leaf for leaf in leaves(config)}
  result = []
  for leaf in leaves(config):
    group = _group(leaf) if fused else None
    if group is None:
      result.append(StoredTensor(leaf.hf_name, (leaf,), leaf.shape))
    elif leaf.path[-2] == _FUSED[group][0]:
      parts = tuple(names[part, 'kernel'] for part in _FUSED[group])
      shape = (sum(part.shape[0] for part in parts), *leaf.shape[1:])
      result.append(StoredTensor(f'model.layers.{{}}.{group}.weight', parts, shape))
  return result


def split_entries(
  config: ModelConfig, entries: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
  """The entries of a file with an entry for each leaf, whether the file stores them fused or not.

  Raises:
    ModelFileError: a fused tensor of another shape than the config says, or beside one of its parts.
  """
  result = dict(entries)
  for tensor in stored_tensors(config, fused=True):
    if len(tensor.parts) == 1:
      continue
    for layer in range(config.num_layers):
      entry = result.pop(tensor.name.format(layer), None)
      if entry is None:
        continue
      if entry.shape != tensor.shape:
        raise ModelFileError(
          f'{entry.path.name}: {entry.name} has shape {entry.shape}, the config says '
          f'{tensor.shape}. Weights and config belong to different models: take both from the same '
          'one.'
        )
      parts = _parts(tensor, entry, layer)
      for name in parts.keys() & result:
        raise ModelFileError(
          f'{entry.path.name}: {name} is stored twice, by itself and within {entry.name}. Download '
          'the model again.'
        )
      result |= parts
  return result


def _group(leaf: Leaf) -> str | None:
  if leaf.path[-1] != 'kernel':
    return None
  return next((name for name, parts in _FUSED.items() if leaf.path[-2] in parts), None)


def _parts(tensor: StoredTensor, entry: TensorEntry, layer: int) -> dict[str, TensorEntry]:
  """Whole rows lie together, so that each part is a stretch of the tensor's bytes."""
  result, start = {}, entry.start
  row_bytes = (entry.stop - entry.start) // tensor.shape[0]
  for leaf in tensor.parts:
    name, stop = leaf.hf_name.format(layer), start + leaf.shape[0] * row_bytes
    result[name] = dataclasses.replace(entry, name=name, shape=leaf.shape, start=start, stop=stop)
    start = stop
  return result
