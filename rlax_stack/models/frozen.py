"""Weights that are not trained, as an adapter has them under it: in float32, in bfloat16, or layers in 8 or 4 bits.

Not for decoding (quantised.py, whose scales belong to whole channels). Symmetric integers with one float32 scale for
every block of at most 64 inputs of a channel; embeddings, norms and biases beside them are bfloat16, as in QLoRA.
See "QLoRA: Efficient Finetuning of Quantized LLMs", Dettmers et al. (https://arxiv.org/abs/2305.14314); the integers
here are evenly spaced, where theirs follow a normal distribution.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

_BLOCK = 64  # inputs that share a scale, at most

# Precision to the integers of a layer's kernel, and the largest one used; None where nothing is rounded to integers.
PRECISIONS = {
  'float32': None,
  'bfloat16': None,
  'int8': (jnp.int8, 127),
  'int4': (jnp.int4, 7),
}


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=('values', 'scales'), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class BlockKernel:
  """A kernel W[..., o, i] ≈ values[..., o, i] · scales[..., o, i // block], block = in / scales.shape[-1]."""

  values: Any  # int8 or int4 [..., out, in]
  scales: Any  # float32 [..., out, blocks]

  def dequantised(self, dtype: Any = jnp.float32) -> jax.Array:
    """The weights that this stands for, [..., out, in] in `dtype`."""
    blocks = self.values.astype(jnp.float32).reshape(*self.scales.shape, -1)
    return (blocks * self.scales[..., None]).reshape(self.values.shape).astype(dtype)


def quantise_blocks(kernel: jax.Array, precision: str) -> BlockKernel:
  """A kernel [..., out, in] of any float dtype in 'int8' or 'int4': |W − values · scales| ≤ scales / 2."""
  kind = PRECISIONS[precision]
  if kind is None:
    raise ValueError(f'{precision} has no integers. Choose int8 or int4.')
  dtype, largest = kind
  size = kernel.shape[-1]
  block = max(length for length in range(1, _BLOCK + 1) if size % length == 0)
  blocks = kernel.astype(jnp.float32).reshape(*kernel.shape[:-1], size // block, block)
  top = jnp.max(jnp.abs(blocks), axis=-1)
  scales = jnp.where(top > 0, top, float(largest)) / largest
  values = jnp.clip(jnp.round(blocks / scales[..., None]), -largest, largest)
  return BlockKernel(values.astype(dtype).reshape(kernel.shape), scales)


@functools.partial(jax.jit, static_argnames='precision')
def _quantise_layers(kernel: jax.Array, precision: str) -> BlockKernel:
  # One layer after another: a stack in float32 would be the largest array of the conversion.
  return jax.lax.map(lambda layer: quantise_blocks(layer, precision), kernel)


def freeze(params: Any, precision: str) -> Any:
  """Parameters in one of PRECISIONS; what has it already stays.

  Args:
    params: the tree of models/decoder.py, any float dtype; kernels may be BlockKernels.
    precision: see PRECISIONS.

  Raises:
    ValueError: integers of another precision.
  """
  integers = PRECISIONS[precision]

  def one(path, leaf):
    if is_block_kernel(leaf):
      if integers is None or leaf.values.dtype != integers[0]:
        raise ValueError(
          f'weights are {leaf.values.dtype} already, and cannot be made {precision}.'
        )
      return leaf
    if integers and path[0].key == 'layers' and path[-1].key == 'kernel':
      return _quantise_layers(leaf, precision)
    return jnp.asarray(leaf, jnp.float32 if precision == 'float32' else jnp.bfloat16)

  return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_block_kernel)


def is_block_kernel(value: Any) -> bool:
  """Whether `value` is a BlockKernel, for walking trees whose leaves they are."""
  return isinstance(value, BlockKernel)
