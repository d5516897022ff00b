"""Which dtype to compute in, decided from the hardware."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from rlax_stack.errors import ConfigError

COMPUTE_DTYPES = ('auto', 'bfloat16', 'float32')
_FAST_BF16_FLAGS = {'amx_bf16', 'avx512_bf16'}


def resolve_compute_dtype(
  name: str, *, cpuinfo: str | None = None, backend: str | None = None
) -> Any:
  """The dtype that `name` means here: jnp.bfloat16 or jnp.float32.

  Under 'auto' it is bfloat16 on an accelerator and on CPUs that multiply it in hardware (AMX,
  AVX512-BF16), float32 elsewhere: emulated bfloat16 is slower than float32.

  Args:
    name: one of COMPUTE_DTYPES.
    cpuinfo: text of /proc/cpuinfo; read from there when None ('' where it does not exist).
    backend: JAX platform name; that of the default backend when None.

  Raises:
    ConfigError: an unknown name.
  """
  if name not in COMPUTE_DTYPES:
    raise ConfigError(f'unknown compute_dtype {name!r}. Set it to one of {COMPUTE_DTYPES}.')
  if name == 'auto':
    fast = (backend or jax.default_backend()) != 'cpu' or bool(
      _FAST_BF16_FLAGS & _cpu_flags(_read_cpuinfo() if cpuinfo is None else cpuinfo)
    )
    name = 'bfloat16' if fast else 'float32'
  return jnp.bfloat16 if name == 'bfloat16' else jnp.float32


def _read_cpuinfo() -> str:
  path = pathlib.Path('/proc/cpuinfo')
  return path.read_text() if path.exists() else ''


def _cpu_flags(cpuinfo: str) -> set[str]:
  for line in cpuinfo.splitlines():
    name, _, value = line.partition(':')
    if name.strip() in ('flags', 'Features'):
      return set(value.split())
  return set()
