"""The engine's decode program for a described TPU: nothing of the size of a KV table beside the tables themselves."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.planning.engine_programs import engine_figures
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig, empty_state

pytest.importorskip('libtpu')

_MODEL = ModelConfig(
  vocab_size=32768,
  hidden_size=1024,
  intermediate_size=2048,
  num_layers=2,
  num_heads=16,
  num_kv_heads=8,
  head_dim=128,
  qk_norm=True,
)
_SIZES = EngineConfig(
  slots=16, max_prompt_tokens=1024, max_new_tokens=4096, compute_dtype=jnp.bfloat16
)


def _bytes(make):
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))


@pytest.mark.parametrize('kv', ['same', 'int8'])
def test_decode_copies_no_table(kv, less_effort):
  """Writing a token's keys and values must not lay the tables out anew, which is a copy of all in every layer."""
  topology = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x2')
  sizes = EngineConfig(**{**vars(_SIZES), 'kv': kv})
  weights = _bytes(
    lambda: Engine(_MODEL, sizes, join_kernels=False).load_params(
      decoder.init_params(_MODEL, jax.random.key(0))
    )
  )
  state = empty_state
  tables = _bytes(lambda: state(_MODEL, sizes)._replace(rows=None, prefix_logits=None))
  whole = _bytes(lambda: state(_MODEL, sizes))
  with less_effort():
    used = engine_figures(_MODEL, sizes, topology.devices[0])
  assert weights + whole <= used.decode < weights + whole + tables / 8
