"""The compute dtype that `auto` means on each kind of hardware."""

import jax.numpy as jnp
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.learner.precision import resolve_compute_dtype

_PLAIN = 'processor\t: 0\nflags\t\t: fpu avx2 fma\n'


@pytest.mark.parametrize(
  ('flags', 'backend', 'want'),
  [
    (_PLAIN, 'cpu', jnp.float32),
    (_PLAIN.replace('fma', 'amx_bf16'), 'cpu', jnp.bfloat16),
    (_PLAIN.replace('fma', 'avx512_bf16'), 'cpu', jnp.bfloat16),
    (_PLAIN.replace('fma', 'avx512_bf16_not'), 'cpu', jnp.float32),
    ('', 'cpu', jnp.float32),
    (_PLAIN, 'tpu', jnp.bfloat16),
  ],
)
def test_auto(flags, backend, want):
  assert resolve_compute_dtype('auto', cpuinfo=flags, backend=backend) == want


def test_named():
  assert resolve_compute_dtype('float32', backend='tpu') == jnp.float32
  assert resolve_compute_dtype('bfloat16', cpuinfo='', backend='cpu') == jnp.bfloat16
  assert resolve_compute_dtype('auto') in (jnp.float32, jnp.bfloat16)
  with pytest.raises(ConfigError, match="'float16'.*bfloat16"):
    resolve_compute_dtype('float16')
