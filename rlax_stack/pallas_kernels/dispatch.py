"""Which form of a kernel runs: one choice for all of them, made where the arrays will live.

Not for what a form computes. Invariant: asking for a form that is absent fails with the reason; only 'auto' may
choose another one.
"""

import jax
from jax.sharding import Mesh

IMPLEMENTATIONS = ('auto', 'pallas', 'xla', 'reference')
WITHOUT_REFERENCE = IMPLEMENTATIONS[:3]  # of kernels whose reference is a function of its own


def target_device(mesh: Mesh | None) -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
  """A device of the mesh (which may be one that is only described), or the default one."""
  return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def no_pallas(device: jax.Device) -> str | None:  # pyright: ignore[reportInvalidTypeForm]
  """Why a device has no Pallas forms of the kernels; None where it has them."""
  return None if device.platform == 'tpu' else f'it is for TPU, and this is {device.platform}'


def choose(
  kernel: str,
  implementation: str,
  *,
  absent: str | None,
  forms: tuple[str, ...] = IMPLEMENTATIONS,
) -> str:
  """The form to run: one of `forms`, never 'auto'.

  Args:
    kernel: its name, for messages.
    implementation: one of `forms`.
    absent: why there is no Pallas form here (`no_pallas`); None where there is one.
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
    return 'xla' if absent is not None else 'pallas'
  return implementation
