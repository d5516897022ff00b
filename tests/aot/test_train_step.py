"""The learner's own train step compiled for a described mesh: all kernels in their places, memory as planned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlax_stack.learner.optimizer import OptimizerSettings, make_optimizer
from rlax_stack.learner.scoring import ForwardSettings, rows_sharding
from rlax_stack.learner.state import abstract_state
from rlax_stack.learner.train_step import make_train_step
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.objective import resolve
from rlax_stack.types import PackedBatch

pytest.importorskip('libtpu')

_QWEN3_8B = ModelConfig(
  vocab_size=151936,
  hidden_size=4096,
  intermediate_size=12288,
  num_layers=2,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  qk_norm=True,
)

_FLOATS = [
  name for name in PackedBatch._fields if 'log_probs' in name or name in ('adv_t', 'reward_t')
]
_DTYPES = dict.fromkeys(_FLOATS, jnp.float32) | {'mask_t': jnp.bool_}


@pytest.mark.parametrize('generation', ['v5p'])
def test_layers_of_an_8b_model(generation, make_tpu_mesh, less_effort):
  """Two of its layers; the loop over layers has one body, however many there are."""
  mesh = make_tpu_mesh(generation, fsdp=2, tensor=2)
  objective, optimizer = resolve(), OptimizerSettings(learning_rate=1e-6)
  forward = ForwardSettings(compute_dtype=jnp.bfloat16, remat='layer')
  step = make_train_step(_QWEN3_8B, mesh, forward=forward, objective=objective, optimizer=optimizer)
  params = decoder.abstract_params(_QWEN3_8B)
  state = abstract_state(params, make_optimizer(optimizer), mesh, objective.init_state)
  fields = {*PackedBatch._fields} - {*PackedBatch._field_defaults} | {'next_index_t'}
  batch = PackedBatch(
    **{
      name: jax.ShapeDtypeStruct(
        (2, 2, 4096), _DTYPES.get(name, jnp.int32), sharding=rows_sharding(mesh)
      )
      for name in fields
    }
  )
  count = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), less_effort():
    compiled = step.lower(state, batch, count).compile(
      compiler_options={'optimization_level': 'O1'}
    )
  text = compiled.as_text()
  for kernel in ('tree_attention', 'tree_attention_dq', 'tree_attention_dkv', 'fused_log_prob'):
    assert kernel in text, kernel
  memory = compiled.memory_analysis()
  sizes = [int(np.prod(x.shape)) for x in jax.tree.leaves(params)]
  # Weights and two moments in float32, donated; what is temporary is gradients, rows and gathered layers.
  assert memory.argument_size_in_bytes == pytest.approx(3 * 4 * sum(sizes) / mesh.size, rel=0.02)
  assert memory.temp_size_in_bytes < 4 * sum(sizes) / mesh.size + (6 << 30)
