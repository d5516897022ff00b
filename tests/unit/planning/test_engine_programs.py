"""The engine's programs, compiled without arrays: bytes against those of a real engine."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from rlax_stack.models import decoder
from rlax_stack.models.shapes import SHAPES
from rlax_stack.pallas_kernels import dispatch
from rlax_stack.planning.engine_programs import EngineFigures, engine_figures
from rlax_stack.planning.learner_programs import OutOfMemory, compiled_or_too_large
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig

_TINY = dataclasses.replace(
  SHAPES['smollm2_135m'], num_layers=2, vocab_size=512, hidden_size=64, intermediate_size=128
)
_SIZES = EngineConfig(slots=4, max_prompt_tokens=32, max_new_tokens=16, compute_dtype=jnp.float32)


def _bytes(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_bytes_are_those_of_an_engine():
  engine = Engine(_TINY, _SIZES, join_kernels=False)
  params = _bytes(engine.load_params(decoder.init_params(_TINY, jax.random.key(0))))
  state = _bytes(engine.init_decode_state())
  found = engine_figures(_TINY, _SIZES, jax.devices()[0])
  assert isinstance(found, EngineFigures) and found.compile_s > 0
  # Beside them: work lists, results and temporaries.
  assert params + state < found.decode < 1.5 * (params + state)
  assert params < found.prefill < 4 * params


def test_a_program_that_is_too_large_is_told_from_other_errors():
  class Lowered:
    def __init__(self, message):
      self._message = message

    def compile(self):
      raise jax.errors.JaxRuntimeError(self._message)

  with pytest.raises(OutOfMemory, match='Ran out of memory in memory space hbm'):
    compiled_or_too_large(Lowered('first\n Ran out of memory in memory space hbm. Used 3G of 1G'))
  with pytest.raises(OutOfMemory, match='memory space smem'):
    compiled_or_too_large(Lowered('Ran out of memory in memory space smem. Used 2M of 1M'))
  with pytest.raises(jax.errors.JaxRuntimeError, match='a defect'):
    compiled_or_too_large(Lowered('a defect'))


def test_a_described_device_stands_for_the_default_one():
  device = jax.devices()[3]
  assert dispatch.target_device(None) == jax.devices()[0]
  with dispatch.described(device):
    assert dispatch.target_device(None) == device
  assert dispatch.target_device(None) == jax.devices()[0]
