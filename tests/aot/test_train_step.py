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
from rlax_stack.sharding import param_shardings
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

_QWEN3_30B_A3B = ModelConfig(
  vocab_size=151936,
  hidden_size=2048,
  intermediate_size=6144,
  num_layers=2,
  num_heads=32,
  num_kv_heads=4,
  head_dim=128,
  qk_norm=True,
  tie_embeddings=False,
  num_experts=128,
  experts_per_token=8,
  moe_intermediate_size=768,
)

_FLOATS = [
  name
  for name in PackedBatch._fields
  if 'log_probs' in name or name in ('adv_t', 'reward_t', 'place_weight')
]
_DTYPES = dict.fromkeys(_FLOATS, jnp.float32) | {'mask_t': jnp.bool_}


@pytest.mark.parametrize(
  ('config', 'sizes', 'gib'),
  [
    (_QWEN3_8B, {'fsdp': 2, 'tensor': 2}, 6.0),
    (_QWEN3_8B, {'fsdp': 2, 'context': 2}, 8.0),  # the whole vocabulary on every device
    (_QWEN3_30B_A3B, {'fsdp': 2, 'expert': 2}, 9.0),
  ],
  ids=['8b', '8b_context', '30b_a3b'],
)
def test_layers_of_a_model(config, sizes, gib, make_tpu_mesh, less_effort):
  """Two of its layers; the loop over layers has one body, however many there are.

  `gib` beside the sum of the gradients: those of a micro-batch, which of a mixture are nearly all experts', and
  a row of hidden states, which there has eight lines for every token of two devices.
  """
  mesh = make_tpu_mesh('v5p', **sizes)
  objective, optimizer = resolve(), OptimizerSettings(learning_rate=1e-6)
  forward = ForwardSettings(compute_dtype=jnp.bfloat16, remat='layer')
  step = make_train_step(config, mesh, forward=forward, objective=objective, optimizer=optimizer)
  params = decoder.abstract_params(config)
  state = abstract_state(params, make_optimizer(optimizer), mesh, objective.init_state)
  fields = {*PackedBatch._fields} - {*PackedBatch._field_defaults} | {'next_index_t'}
  fields |= {'place_weight'} if config.num_experts else set()
  batch = PackedBatch(
    **{
      name: jax.ShapeDtypeStruct(
        (2, 4, 4096), _DTYPES.get(name, jnp.int32), sharding=rows_sharding(mesh)
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
  # What is gathered is cast before: the whole width of the head, or of experts, occurs in bfloat16 alone.
  vocab = config.vocab_size // sizes.get('tensor', 1)
  assert f'bf16[{vocab},{config.hidden_size}]' in text
  assert f'f32[{vocab},{config.hidden_size}]' not in text
  if config.num_experts:
    assert 'f32[1,64,768,2048]' not in text and 'bf16[1,64,768,2048]' in text
  memory = compiled.memory_analysis()
  held = jax.tree.map(
    lambda x, where: int(np.prod(where.shard_shape(x.shape))), params, param_shardings(params, mesh)
  )
  held = sum(jax.tree.leaves(held))
  # Weights and two moments in float32, donated; what is temporary is gradients, rows and gathered layers.
  assert memory.argument_size_in_bytes == pytest.approx(3 * 4 * held, rel=0.02)
  assert memory.temp_size_in_bytes < 4 * held + gib * 2**30
