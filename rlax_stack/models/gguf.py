"""GGUF files as models: config, parameters, tokenizer and chat template of one file.

llama.cpp stores q and k of the llama architecture with the two halves of each rotary pair side by
side; they are put back to the half-rotation order of the decoder. The qwen architectures are stored
in that order.
"""

import dataclasses
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlax_stack.errors import ModelFileError
from rlax_stack.models.assemble import assemble, check_shapes
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.gguf_config import config_from_gguf
from rlax_stack.models.gguf_reader import GGUFFile, read_gguf
from rlax_stack.models.gguf_tokenizer import tokenizer_from_gguf
from rlax_stack.models.layout import Leaf
from rlax_stack.models.tokenizer import Tokenizer

_FACTORS = 'rope_freqs.weight'


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFModel:
  """A whole model. `params` is the tree of `layout.leaves`; `metadata` is the file's, as read."""

  config: ModelConfig
  params: dict[str, Any]
  tokenizer: Tokenizer
  chat_template: str | None
  metadata: dict[str, Any]


def load_gguf(path: str | os.PathLike, *, dtype: Any = jnp.float32) -> GGUFModel:
  """Reads a GGUF file; quantised tensors (Q8_0, Q4_0, Q4_1) are dequantised.

  Args:
    path: the file.
    dtype: of the parameters.

  Raises:
    ModelFileError: a missing, torn or hostile file, an unsupported architecture, or tensors that do
      not fit the metadata; before anything of the model's size is allocated.
  """
  file = read_gguf(path)
  config = _config(file)
  check_shapes(
    config,
    {name: tensor.shape for name, tensor in file.tensors.items()},
    name_of=lambda leaf: leaf.gguf_name,
    source=file.path.name,
    ignore=lambda name: name == _FACTORS,
  )
  tokenizer = tokenizer_from_gguf(file.metadata, source=file.path.name)
  permuted = file.metadata['general.architecture'] == 'llama'

  def read(leaf: Leaf, place: tuple[int, ...]) -> np.ndarray:
    value = file.read(leaf.gguf_name.format(*place))
    heads = {'q_proj': config.num_heads, 'k_proj': config.num_kv_heads}.get(leaf.path[1])
    return value if heads is None or not permuted else to_half_rotation(value, heads)

  return GGUFModel(
    config=config,
    params=assemble(config, read, dtype=dtype),
    tokenizer=tokenizer,
    chat_template=tokenizer.chat_template,
    metadata=file.metadata,
  )


def describe_gguf(path: str | os.PathLike) -> tuple[ModelConfig, Tokenizer]:
  """Config and tokenizer of a GGUF file, without its parameters; raises as `load_gguf`."""
  file = read_gguf(path)
  return _config(file), tokenizer_from_gguf(file.metadata, source=file.path.name)


def to_half_rotation(value: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows [heads * head_dim, ...] from pairs (2i, 2i + 1) to pairs (i, i + head_dim / 2) in each head."""
  pairs = value.reshape(num_heads, -1, 2, *value.shape[1:])
  return pairs.swapaxes(1, 2).reshape(value.shape)


def _config(file: GGUFFile) -> ModelConfig:
  embedding = file.tensors.get('token_embd.weight')
  if embedding is None:
    raise ModelFileError(f'{file.path.name}: token_embd.weight is missing: not a language model.')
  factors = None
  if _FACTORS in file.tensors:
    if len(file.tensors[_FACTORS].shape) != 1 or file.tensors[_FACTORS].shape[0] > 4096:
      raise ModelFileError(
        f'{file.path.name}: {_FACTORS} has shape {file.tensors[_FACTORS].shape}.'
      )
    factors = file.read(_FACTORS)
  return config_from_gguf(
    file.metadata,
    source=file.path.name,
    vocab_size=embedding.shape[0],
    tied='output.weight' not in file.tensors,
    frequency_factors=factors,
  )
