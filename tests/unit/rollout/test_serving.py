"""The column-wise serving layers against the plain decoder, for the options that models may have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models import decoder
from rlax_stack.models.config import RopeScaling
from rlax_stack.models.rotary import rotation
from rlax_stack.pallas_kernels.decode_work import make_work_list
from rlax_stack.pallas_kernels.shared_prefix_decode import NO_WINDOW
from rlax_stack.rollout import serving
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import empty_state
from rlax_stack.rollout.prefill import CAUSAL, AttentionRule, attention_rule, causal_attention
from rlax_stack.rollout.step_inputs import step_inputs

_GEMMA = {
  'activation': 'gelu_tanh',
  'post_norms': True,
  'unit_offset_norms': True,
  'scale_embeddings': True,
  'sliding_window': 3,
  'global_layers': (1,),
}
_VARIANTS = {
  'llama': {},
  'qwen2': {'attention_bias': True, 'tie_embeddings': False},
  'qwen3': {'qk_norm': True, 'num_layers': 1},
  'phi3': {
    'partial_rotary_factor': 0.5,
    'sliding_window': 4,
    'rope_scaling': RopeScaling(kind='factors', factors=(1.0, 3.0), attention_factor=1.3),
  },
  'gemma2': {
    **_GEMMA,
    'query_pre_attn_scalar': 5,
    'attention_soft_cap': 2.0,
    'final_soft_cap': 4.0,
  },
  'gemma3': {**_GEMMA, 'qk_norm': True, 'local_rope_theta': 50.0},
  'mixtral': {'num_experts': 4, 'experts_per_token': 2, 'moe_intermediate_size': 24},
  'qwen3_moe': {
    'num_experts': 6,
    'experts_per_token': 3,
    'moe_intermediate_size': 16,
    'norm_topk_prob': False,
    'qk_norm': True,
  },
}


def _random(tree, seed):
  leaves, structure = jax.tree.flatten(tree)
  random = np.random.default_rng(seed)
  filled = [jnp.asarray(0.3 * random.normal(size=x.shape), jnp.float32) for x in leaves]
  return jax.tree.unflatten(structure, filled)


@pytest.mark.parametrize('joined', [True, False])
@pytest.mark.parametrize('variant', sorted(_VARIANTS))
def test_layers_equal_the_plain_decoder(tiny, variant, joined):
  config = dataclasses.replace(tiny.MODEL, **_VARIANTS[variant])
  params = _random(decoder.abstract_params(config), 3)
  tokens, positions = tiny.prompt(0, 6), jnp.arange(6, dtype=jnp.int32)
  served = Engine(config, tiny.SIZES, join_kernels=joined).load_params(params)
  assert bool(served.kernels) == joined
  kinds = decoder.layers_that_see_all(config)

  def attend(q, k, v, **kind):
    return causal_attention(q, k, v, attention_rule(config, **kind))

  x = decoder.embed(params, config, tokens, jnp.float32).T
  for layer in range(config.num_layers):
    local = config.local_rope_theta is not None and layer not in config.global_layers
    sin, cos = serving.column_rotation(config, positions, local=local)
    kind = {} if kinds is None else {'sees_all': kinds[layer]}
    layer = jnp.int32(layer)
    q, k, v = serving.project_qkv(served, config, layer, x, sin, cos)
    attended = attend(q[None], k[None], v[None], **kind)[0]
    x, _ = serving.finish_layer(served, config, layer, x, attended)
  hidden = decoder.hidden_states(params, config, jnp.asarray(tokens)[None], positions[None], attend)
  want = decoder.capped(config, hidden[0] @ decoder.lm_head(params, config).T)
  got = serving.logits_of(served, config, x).T
  np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-5)


def test_every_layer_gets_its_own_plan_and_rotation(tiny):
  config = dataclasses.replace(tiny.MODEL, **_VARIANTS['gemma3'], rope_theta=1000.0)
  rows = empty_state(config, tiny.SIZES).rows._replace(
    position=jnp.arange(8, dtype=jnp.int32) + 9,
    count=jnp.full(8, 3, jnp.int32),
    active=jnp.arange(8) < 5,
  )
  work = make_work_list([None] * 8, page_size=16, rows_per_block=4, max_items=4)
  of_layer = step_inputs(config, tiny.SIZES, rows, work, jnp.zeros((8, 3), jnp.int32))
  for layer, sees_all in ((0, False), (1, True)):
    plan, *found = jax.jit(lambda layer: (of_layer(layer)[0].oldest, *of_layer(layer)[1:]))(
      jnp.int32(layer)
    )
    length = np.arange(8) + 9 + 1 - 3 + np.where(np.arange(8) < 5, 3, 0)
    np.testing.assert_array_equal(plan, length - (NO_WINDOW if sees_all else 3))
    want = serving.column_rotation(config, rows.position, local=not sees_all)
    for got, expected in zip(found, want, strict=True):
      np.testing.assert_allclose(got, expected, atol=1e-6)
  plain = step_inputs(tiny.MODEL, tiny.SIZES, rows, work, jnp.zeros((8, 3), jnp.int32))
  assert plain(jnp.int32(0))[0].oldest is None


def test_rotation_equals_the_decoders(tiny):
  positions = jnp.asarray([0, 3, 100], jnp.int32)
  for column, plain in zip(
    serving.column_rotation(tiny.MODEL, positions), rotation(tiny.MODEL, positions), strict=True
  ):
    np.testing.assert_array_equal(column[0].T, plain[:, 0])


def test_fused_kernels_are_the_models_rows(tiny):
  stacked = tiny.params()['layers']
  fused = serving.fuse_layer(stacked, jnp.int32(1), dtype=jnp.bfloat16)
  for layer in serving.fuse_layers(stacked, jnp.bfloat16)[1:]:
    jax.tree.map(np.testing.assert_array_equal, layer, fused)
  want = jnp.concatenate([stacked[f'{n}_proj']['kernel'][1] for n in 'qkv'])
  assert fused['qkv'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(fused['qkv'], want.astype(jnp.bfloat16))
  assert {name: w.shape for name, w in fused.items()} == {
    'qkv': (64, 32),
    'o': (32, 32),
    'gate_up': (96, 32),
    'down': (32, 48),
  }
  bias = {f'{n}_proj': {'bias': jnp.full((2, 3), i, jnp.float32)} for i, n in enumerate('qkv')}
  np.testing.assert_array_equal(
    serving.fuse_bias(bias, jnp.float32)[0], [0] * 3 + [1] * 3 + [2] * 3
  )


_RULES = [
  CAUSAL,
  AttentionRule(window=3),
  AttentionRule(window=3, scale=0.7, soft_cap=1.5),
  AttentionRule(window=jnp.int32(3)),
]


@pytest.mark.parametrize('rule', _RULES)
def test_causal_attention_in_query_blocks(rule):
  random = np.random.default_rng(0)
  length = 300  # two blocks of queries
  q, k, v = (random.normal(size=(1, length, n, 4)).astype(np.float32) for n in (4, 2, 2))
  got = causal_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), rule)
  for t in (0, 1, 255, 256, 299):
    start = 0 if rule.window is None else max(0, t + 1 - int(rule.window))
    for head in range(4):
      scores = k[0, start : t + 1, head // 2].astype(np.float64) @ q[0, t, head]
      scores = scores * (rule.scale or 0.5)
      if rule.soft_cap:
        scores = rule.soft_cap * np.tanh(scores / rule.soft_cap)
      weights = np.exp(scores - scores.max())
      want = weights @ v[0, start : t + 1, head // 2] / weights.sum()
      np.testing.assert_allclose(got[0, t, head], want, atol=1e-5)


def test_quantised_kernels_are_taken_out_of_the_tree(tiny):
  """With the layers held once: the products of joined kernels."""
  sizes = dataclasses.replace(tiny.SIZES, weights='int8_dynamic')
  x = jnp.asarray(np.random.default_rng(0).normal(size=(tiny.MODEL.hidden_size, 5)), jnp.float32)
  found = []
  for joined in (True, False):
    served = Engine(tiny.MODEL, sizes, join_kernels=joined).load_params(tiny.params())
    sin, cos = serving.column_rotation(tiny.MODEL, jnp.arange(5, dtype=jnp.int32))
    found.append(serving.project_qkv(served, tiny.MODEL, jnp.int32(1), x, sin, cos))
  for one, other in zip(*found, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)
