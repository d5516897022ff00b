"""What every test runs under: eight CPU devices and a JAX that refuses to guess.

The environment is set before JAX is imported, because the number of devices is fixed at its first
use.
"""

import gc
import os
import sys

# Eight devices, and machine code that is quick to make: tests compile many programs and run them once.
# Processes that tests start (launch, evaluate) and the parity tests compile as users do.
_FLAGS = {
  '--xla_force_host_platform_device_count': '8',
  '--xla_backend_optimization_level': '0',
}

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
if not any('tests/parity' in argument for argument in sys.argv):
  for name, value in _FLAGS.items():
    if name not in os.environ.get('XLA_FLAGS', ''):
      os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {name}={value}'.strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# An implicit float32/bfloat16 or [T]/[B, T] mix is a defect here, never a convenience.
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Compilation makes the first example slow and the next ones quick, so a deadline would only flake.
hypothesis.settings.register_profile('local', deadline=None, max_examples=25)
hypothesis.settings.register_profile(
  'ci', deadline=None, max_examples=50, derandomize=True, database=None
)
hypothesis.settings.load_profile('ci' if os.environ.get('CI') else 'local')

_MOST_MAPPINGS = 30000  # Linux allows a process 65,530, and a compiled program takes a few; XLA crashes at the limit


def _mappings() -> int:
  try:
    with open('/proc/self/maps', encoding='utf-8') as lines:
      return sum(1 for _ in lines)
  except OSError:
    return 0  # no Linux, no such limit


@pytest.fixture(autouse=True, scope='module')
def _room_for_programs():
  """Gives the programs of earlier files up before the process has too many."""
  yield
  if _mappings() > _MOST_MAPPINGS:
    jax.clear_caches()
    gc.collect()
