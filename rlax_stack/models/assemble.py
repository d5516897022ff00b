"""Tensors of a file to the parameter tree: first every shape is checked, then leaf after leaf read.

The importers give a description of every tensor and a function that reads one; peak memory is the
tree plus one leaf.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.errors import ModelFileError
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.layout import Leaf, leaves, set_leaf


def check_shapes(
  config: ModelConfig,
  shapes: Mapping[str, tuple[int, ...]],
  *,
  name_of: Callable[[Leaf], str],
  source: str,
  ignore: Callable[[str], bool],
) -> None:
  """Refuses a file whose tensors are not exactly those of `config`. Allocates nothing.

  Args:
    shapes: shape of every tensor of the file by name.
    name_of: the name pattern of a leaf in this kind of file.
    source: the file, for messages.
    ignore: whether a tensor that the config does not have may be passed over.

  Raises:
    ModelFileError: a tensor that is missing, of another shape, or that the config has no place for.
  """
  known = set()
  for leaf in leaves(config):
    for place in leaf.places(config):
      name = name_of(leaf).format(*place)
      known.add(name)
      if name not in shapes:
        raise ModelFileError(_missing(source, name, leaf, config))
      if tuple(shapes[name]) != leaf.shape:
        raise ModelFileError(
          f'{source}: {name} has shape {tuple(shapes[name])}, the config says {leaf.shape}. '
          'Weights and config belong to different models: take both from the same one.'
        )
  for name in shapes:
    if name not in known and not ignore(name):
      raise ModelFileError(
        f'{source}: {name} of shape {tuple(shapes[name])} has no place in the config '
        f'({config.num_layers} layers, tie_embeddings={config.tie_embeddings}, '
        f'attention_bias={config.attention_bias}, qk_norm={config.qk_norm}, '
        f'post_norms={config.post_norms}, num_experts={config.num_experts}). '
        'Weights and config belong to different models, or the architecture is not supported.'
      )


def assemble(
  config: ModelConfig,
  read: Callable[[Leaf, tuple[int, ...]], np.ndarray],
  *,
  dtype: Any = jnp.float32,
) -> dict[str, Any]:
  """The parameter tree, each leaf cast to `dtype`.

  Args:
    config: its shapes were checked against the file.
    read: the tensor of a leaf at one of its `places`, of the leaf's shape.
    dtype: of the leaves.

  Returns: nested dict of jax arrays (see `layout.leaves` for paths and shapes).
  """
  params: dict[str, Any] = {}
  for leaf in leaves(config):
    value = np.empty(leaf.full_shape(config), dtype)
    for place in leaf.places(config):
      value[place] = read(leaf, place)
    set_leaf(params, leaf.path, jax.block_until_ready(jax.device_put(value)))
  return params


def _missing(source: str, name: str, leaf: Leaf, config: ModelConfig) -> str:
  text = f'{source}: {name} of shape {leaf.shape} is missing.'
  if leaf.path[0] == 'lm_head':
    return f'{text} Set tie_word_embeddings to true in config.json where the model has no own head.'
  return f'{text} Download the model again, or correct the config ({config.num_layers} layers).'
