"""What the GPU kernels have in common: products of a warpgroup, scores, vectors spread over tiles, the launch.

Used inside of kernels, on references to shared memory and values in registers. Not for what a kernel walks over.

Left operands come from shared memory even where they were made in registers, and a sum that is rescaled is added to
outside of the tensor cores: the CPU interpreter of jax 0.12 knows no other way, and what is tested is what runs.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64  # rows of a warpgroup's product
LOG2E = math.log2(math.e)
HIDDEN = -1e30  # score of what is hidden
LOWEST = -1e29  # first running maximum: above HIDDEN, so what is wholly hidden adds nothing


def multiply(left: Any, right: Any) -> jax.Array:
  """Product of shared memory, left [rows, n] @ right [n, columns], as float32 in registers."""

  def run(acc):
    plgpu.wgmma(acc, left, right)
    return acc[...]

  return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[1]), jnp.float32))


def multiply_pairs(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
  """Two products [rows, n] @ [columns, n]' of equal shapes, both begun before either is awaited."""

  def run(first, second):
    plgpu.wgmma(first, left[0], right[0].transpose((1, 0)))
    plgpu.wgmma(second, left[1], right[1].transpose((1, 0)))
    return first[...], second[...]

  acc = plgpu.WGMMAAccumulatorRef((left[0].shape[0], right[0].shape[0]), jnp.float32)
  return pl.run_scoped(run, acc, acc)


def scores_of(
  products: jax.Array, scale: float, soft_cap: float | None
) -> tuple[jax.Array, jax.Array | None]:
  """Scores times log2(e) from products of queries and keys, and their tanh where they are capped.

  tanh is made of exp: the instruction for it is good to three digits only.
  """
  if soft_cap is None:
    return (LOG2E * scale) * products, None
  tanh = 1.0 - 2.0 / (1.0 + jnp.exp2((2 * LOG2E * scale / soft_cap) * products))
  return (LOG2E * soft_cap) * tanh, tanh


def d_products(d_scores: jax.Array, tanh: jax.Array | None, scale: float) -> jax.Array:
  """Gradient of the products of `scores_of` from that of the scores (without log2(e))."""
  return scale * (d_scores if tanh is None else d_scores * (1.0 - tanh * tanh))


def spread(values: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
  """A vector over `axis` of a tile, the same along the other axis."""
  return lax.broadcast_in_dim(values, shape, (axis,))


def vector_over(axis: int, memory: Any) -> jax.Array:
  """Loads a vector of shared or global memory for `spread` over an axis of a product."""
  return plgpu.load(memory, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


def tile_iota(shape: tuple[int, ...], axis: int) -> jax.Array:
  """int32 places along an axis of a product."""
  return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def launch(
  name: str,
  body: Callable[[dict[str, Any]], None],
  *,
  inputs: Mapping[str, jax.Array],
  outputs: Mapping[str, jax.ShapeDtypeStruct],
  scratch: Mapping[str, Any],
  grid: Mapping[str, int],
  warpgroups: int,
  interpret: Any,
) -> tuple[jax.Array, ...]:
  """Runs one kernel; the axis 'wg' tells its warpgroups apart.

  Args:
    name: of the kernel.
    body: takes all references by name.
    inputs: arrays in global memory.
    outputs: shapes of the results, left undefined where the kernel writes nothing.
    scratch: shared memory and barriers.
    grid: sizes of the axes; the first one changes fastest.
    warpgroups: of a thread block; up to two may use 255 registers a thread, three 168.
    interpret: False or plgpu.InterpretGPUParams.
  """
  names = (*inputs, *outputs, *scratch)
  return plgpu.kernel(
    lambda *refs: body(dict(zip(names, refs, strict=True))),
    out_type=tuple(outputs.values()),
    scratch_types=tuple(scratch.values()),
    grid=tuple(grid.values()),
    grid_names=tuple(grid),
    num_threads=warpgroups,
    thread_name='wg',
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
    kernel_name=name,
  )(*inputs.values())
