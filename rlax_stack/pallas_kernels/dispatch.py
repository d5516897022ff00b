"""Which form of a kernel runs: one choice for all of them, made where the arrays will live.

Not for what a form computes. Invariant: asking for a form that is absent fails with the reason; only 'auto' may
choose another one.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

IMPLEMENTATIONS = ('auto', 'pallas', 'xla', 'reference')
WITHOUT_REFERENCE = IMPLEMENTATIONS[:3]  # of kernels whose reference is a function of its own

_GPU_HEAD_DIMS = (64, 128)  # wider ones leave dk and dv too few registers
_MOSAIC_GPU = (
  0,
  12,
)  # first jax whose Mosaic GPU has an interpreter, which is where the kernels are tested


_described: contextvars.ContextVar[Any] = contextvars.ContextVar('described', default=None)


@contextlib.contextmanager
def described(device: jax.Device) -> Iterator[None]:  # pyright: ignore[reportInvalidTypeForm]
  """Within it, programs without a mesh are for this device, which may be one that is only described."""
  token = _described.set(device)
  try:
    yield
  finally:
    _described.reset(token)


def target_device(mesh: Mesh | None) -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
  """A device of the mesh (which may be one that is only described), the one that `described` says, or the default."""
  if mesh is not None:
    return mesh.devices.flat[0]
  given = _described.get()
  return jax.devices()[0] if given is None else given


def no_pallas(
  device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
  *,
  on_gpu: bool = False,
) -> str | None:
  """Why a device has no Pallas form of a kernel; None where it has one.

  Args:
    device: where the kernel would run.
    on_gpu: whether the kernel has a form for Hopper GPUs beside the one for TPU.
  """
  if device.platform == 'tpu':
    return None
  if not on_gpu:
    return f'it is for TPU, and this is {device.platform}'
  if not is_gpu(device):
    return f'it is for TPU and Hopper GPUs, and this is {device.platform}'
  if jax.__version_info__ < _MOSAIC_GPU:
    return f'on a GPU it needs jax 0.12 (Python 3.12), and this is {jax.__version__}'
  capability = getattr(device, 'compute_capability', 'unknown')
  if not capability.startswith('9.'):
    # Its products are wgmma, which neither older GPUs nor Blackwell have.
    return f'on a GPU it is for Hopper, and this one has compute capability {capability}'
  return None


def is_gpu(device: jax.Device) -> bool:  # pyright: ignore[reportInvalidTypeForm]
  """Whether the forms for Hopper count; they have never run on one, so 'auto' leaves them alone."""
  return device.platform == 'gpu'


def no_gpu_form(dtype: Any, head_dim: int) -> str | None:
  """Why the forms for Hopper GPUs do not fit arrays; None where they do.

  Args:
    dtype: of queries, keys and values.
    head_dim: width of a head.
  """
  if np.dtype(dtype) != jnp.bfloat16:
    # The tensor cores have no float32 product.
    return f'on a GPU it is for bfloat16, and this is {np.dtype(dtype)}'
  if head_dim not in _GPU_HEAD_DIMS:
    return f'on a GPU it is for heads of width 64 and 128, and this is {head_dim}'
  return None


def choose(
  kernel: str,
  implementation: str,
  *,
  absent: str | None,
  measured: bool = True,
  forms: tuple[str, ...] = IMPLEMENTATIONS,
) -> str:
  """The form to run: one of `forms`, never 'auto'.

  Args:
    kernel: its name, for messages.
    implementation: one of `forms`.
    absent: why there is no Pallas form here (`no_pallas`); None where there is one.
    measured: whether the Pallas form has run on such a device; 'auto' is 'xla' where it has not.
    forms: those that the kernel has.

  Raises:
    ValueError: an unknown implementation, or 'pallas' where it is absent.
  """
  if implementation not in forms:
    raise ValueError(f'unknown {implementation=}. Choose from {", ".join(forms)}.')
  if implementation == 'pallas' and absent is not None:
    raise ValueError(
      f"implementation 'pallas' of {kernel} is absent: {absent}. Choose 'auto' or 'xla'."
    )
  if implementation == 'auto':
    return 'pallas' if absent is None and measured else 'xla'
  return implementation
