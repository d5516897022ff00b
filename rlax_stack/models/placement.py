"""Where activations and a layer's parameters lie while the layers run, said to the compiler instead of left to it.

Without it XLA chooses from the parameters alone: it may split hidden states by features, or sum a whole gradient on
every device where each needs its own part.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from rlax_stack.sharding import param_logical_axes, sharding_for

# Steps from a parameter's name to the numbers of its kernel: an NNX variable, what an adapter changes, a quantised one.
_WHOLE_KERNEL = {'value', 'base', 'values'}


def placed_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
  """Hidden states [R, T, D] of rows, or of parts of rows, split by them; as they are without a mesh."""
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, sharding_for(mesh, ('row_parts', None, 'features')))


def placed_layer(layer: Any, mesh: Mesh | None) -> Any:
  """Parameters of one layer, a tree with their names, split as their stack is; so are their gradients."""
  if mesh is None:
    return layer

  def place(path: Any, leaf: jax.Array) -> jax.Array:
    parts = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
    if parts - _WHOLE_KERNEL:
      return leaf  # a small part of an adapter, or the scales of a quantised kernel
    axes = param_logical_axes(path, leaf.ndim + 1)[1:]
    return jax.lax.with_sharding_constraint(leaf, sharding_for(mesh, axes))

  return jax.tree_util.tree_map_with_path(place, layer)
