"""Which form of a kernel runs: one choice for all of them, made where the arrays will live.

Not for what a form computes. Invariant: asking for a form that is absent fails with the reason; only 'auto' may
choose another one.
"""

import jax
from jax.sharding import Mesh

IMPLEMENTATIONS = ('auto', 'pallas', 'xla', 'reference')


def target_device(mesh: Mesh | None) -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
  """A device of the mesh (which may be one that is only described), or the default one."""
  return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def choose(kernel: str, implementation: str, *, absent: str | None) -> str:
  """'pallas', 'xla' or 'reference'.

  Args:
    kernel: its name, for messages.
    implementation: one of IMPLEMENTATIONS.
    absent: why there is no Pallas form here; None where there is one.

  Raises:
    ValueError: an unknown implementation, or 'pallas' where it is absent.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f'unknown {implementation=}. Choose from {", ".join(IMPLEMENTATIONS)}.')
  if implementation == 'pallas' and absent is not None:
    raise ValueError(
      f"implementation 'pallas' of {kernel} is absent: {absent}. Choose 'auto' or 'xla'."
    )
  if implementation == 'auto':
    return 'xla' if absent is not None else 'pallas'
  return implementation
