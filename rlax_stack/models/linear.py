"""A linear layer over kernels of any form: plain, quantised, frozen in blocks, with an adapter beside them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rlax_stack.models.adapter import AdaptedKernel, adapted_product
from rlax_stack.models.frozen import BlockKernel
from rlax_stack.models.quantised import QuantisedKernel, rows_product

_PRECISE_BLOCK = 64  # inputs summed at once where the highest precision is asked for


class Linear(nnx.Module):
  """y = x Wᵀ (+ b) with W stored [out, in], quantised, adapted or neither; computes in the dtype of x.

  Under `jax.default_matmul_precision('highest')` the sum over `in` is taken in blocks: less rounding, and
  slower. For comparing logits, not for training.
  """

  def __init__(self, in_size: int, out_size: int, *, bias: bool, rngs: nnx.Rngs):
    scale = in_size**-0.5
    self.kernel = nnx.Param(
      scale * jax.random.truncated_normal(rngs.params(), -2.0, 2.0, (out_size, in_size))
    )
    self.bias = nnx.Param(jnp.zeros((out_size,), jnp.float32)) if bias else None

  def __call__(self, x: jax.Array) -> jax.Array:
    # Two-dimensional, because the kernel's gradient over two row axes at once is slower on CPU.
    flat = x.reshape(-1, x.shape[-1])
    y = _times_kernel(flat, self.kernel.get_value())
    y = y.reshape(*x.shape[:-1], y.shape[1])
    if self.bias is None:
      return y
    return y + self.bias[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def _times_kernel(x: jax.Array, kernel: Any) -> jax.Array:
  """x [M, in] Wᵀ of a kernel of any form."""
  if isinstance(kernel, AdaptedKernel):
    return adapted_product(x, kernel, _times_kernel(x, kernel.base))
  if isinstance(kernel, QuantisedKernel):
    return rows_product(x, kernel)
  if isinstance(kernel, BlockKernel):
    return _block_product(x, kernel)
  return _product(x, kernel.astype(x.dtype))


# The weights are made again in the backward pass: kept for it, they would undo the saving.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _block_product(x: jax.Array, kernel: BlockKernel) -> jax.Array:
  return _product(x, kernel.dequantised(x.dtype))


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x [M, in] Wᵀ [in, out]; the CPU sums one long chain in float32, whatever precision is asked for."""
  contract = (((1,), (1,)), ((), ()))
  if jax.config.jax_default_matmul_precision not in ('highest', 'float32'):
    return jax.lax.dot_general(x, kernel, contract)
  parts = range(0, x.shape[1], _PRECISE_BLOCK)
  blocks = [(x[:, i : i + _PRECISE_BLOCK], kernel[:, i : i + _PRECISE_BLOCK]) for i in parts]
  return functools.reduce(jnp.add, [jax.lax.dot_general(*block, contract) for block in blocks])
