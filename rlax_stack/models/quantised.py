"""Kernels of one byte a weight: what they are, how to make them, and how to multiply by them.

Symmetric scales, one float32 per output channel, computed by qwix from the largest weight of the channel. Products are
our own: qwix's multiplies the scales into the whole kernel first where only one side is quantised, which brings the
bytes back. Not for training: no gradient flows through a quantised kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import qwix

# qwix lets the largest int8 stand for 127.5, which puts the largest number of every line on the border of two steps:
# half a step of error where it weighs most, and a result that hangs on the last bit of a division. Here it is 127.
_CALIBRATION = {
  jnp.dtype(jnp.int8): f'absmax,{127.5 / 127}',
  jnp.dtype(jnp.float8_e4m3fn): 'absmax',
}

# Kind of weights to the dtype of a weight, and whether activations are rounded to int8 too.
KERNEL_KINDS = {
  'int8': (jnp.int8, False),
  'int8_dynamic': (jnp.int8, True),
  'fp8': (jnp.float8_e4m3fn, False),
}


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('values', 'scales'),
  meta_fields=('round_activations',),
)
@dataclasses.dataclass(frozen=True)
class QuantisedKernel:
  """A kernel W[..., o, i] ≈ values[..., o, i] · scales[..., o]."""

  values: Any  # int8 or float8_e4m3fn [..., out, in]
  scales: Any  # float32 [..., out]
  round_activations: bool = False  # products take int8 activations, with a scale per token

  def dequantised(self) -> jax.Array:
    """The weights that the products stand for, float32 [..., out, in]."""
    return self.values.astype(jnp.float32) * self.scales[..., None]


Kernel = jax.Array | QuantisedKernel


def quantise_lines(x: jax.Array, dtype: Any, *, axis: int = -1) -> tuple[jax.Array, jax.Array]:
  """x ≈ values · scales with a scale per line along `axis`.

  Args:
    x: any float dtype and shape.
    dtype: int8 or float8_e4m3fn.
    axis: along which a scale is shared.

  Returns: values of the shape of x in `dtype`; float32 scales, with length 1 along the axis. A line's largest number
    becomes the largest one of the dtype; a line of zeros has scale 1.
  """
  lines = [i for i in range(x.ndim) if i != axis % x.ndim]
  quantised = qwix.quantize(
    x.astype(jnp.float32),
    dtype,
    channelwise_axes=lines,
    calibration_method=_CALIBRATION[jnp.dtype(dtype)],
  )
  return quantised.qvalue, quantised.scale


def quantise_kernel(kernel: jax.Array, kind: str) -> QuantisedKernel:
  """A kernel [..., out, in] of any float dtype as one of KERNEL_KINDS.

  int8: |W − values · scales| ≤ scales / 2. fp8: within 1/16 of each weight, and 2⁻¹⁰ · scales near 0.
  """
  dtype, round_activations = KERNEL_KINDS[kind]
  values, scales = quantise_lines(kernel, dtype)
  return QuantisedKernel(values, scales[..., 0], round_activations)


def columns_product(kernel: Kernel, x: jax.Array) -> jax.Array:
  """W x of x [in, M] -> [out, M] in the dtype of x; sums in float32 or, of int8 by int8, exact."""
  if not isinstance(kernel, QuantisedKernel):
    return kernel @ x
  scales, contract = kernel.scales[:, None], (((1,), (0,)), ((), ()))
  if not kernel.round_activations:
    y = jax.lax.dot_general(
      kernel.values.astype(x.dtype), x, contract, preferred_element_type=jnp.float32
    )
    return (y * scales).astype(x.dtype)
  rounded, steps = quantise_lines(x, jnp.int8, axis=0)
  y = jax.lax.dot_general(kernel.values, rounded, contract, preferred_element_type=jnp.int32)
  return (y.astype(jnp.float32) * scales * steps).astype(x.dtype)


def rows_product(x: jax.Array, kernel: QuantisedKernel) -> jax.Array:
  """x Wᵀ of x [M, in] -> [M, out]; otherwise as `columns_product`."""
  scales, contract = kernel.scales[None, :], (((1,), (1,)), ((), ()))
  if not kernel.round_activations:
    y = jax.lax.dot_general(
      x, kernel.values.astype(x.dtype), contract, preferred_element_type=jnp.float32
    )
    return (y * scales).astype(x.dtype)
  rounded, steps = quantise_lines(x, jnp.int8)
  y = jax.lax.dot_general(rounded, kernel.values, contract, preferred_element_type=jnp.int32)
  return (y.astype(jnp.float32) * scales * steps).astype(x.dtype)
