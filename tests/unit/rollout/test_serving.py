"""The column-wise serving layers against the plain decoder, for the options that models may have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models import decoder
from rlax_stack.models.rotary import rotation
from rlax_stack.rollout import serving
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.prefill import causal_attention

_VARIANTS = {
  'llama': {},
  'qwen2': {'attention_bias': True, 'tie_embeddings': False},
  'qwen3': {'qk_norm': True, 'num_layers': 1},
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


@pytest.mark.parametrize('variant', sorted(_VARIANTS))
def test_layers_equal_the_plain_decoder(tiny, variant):
  config = dataclasses.replace(tiny.MODEL, **_VARIANTS[variant])
  params = _random(decoder.abstract_params(config), 3)
  tokens, positions = tiny.prompt(0, 6), jnp.arange(6, dtype=jnp.int32)
  served = Engine(config, tiny.SIZES).load_params(params)
  sin, cos = serving.column_rotation(config, positions)
  x = params['embedder']['embedding'][tokens].T
  for layer in range(config.num_layers):
    layer = jnp.int32(layer)
    q, k, v = serving.project_qkv(served, config, layer, x, sin, cos)
    attended = causal_attention(q[None], k[None], v[None])[0]
    x = serving.finish_layer(served, config, layer, x, attended)
  hidden = decoder.hidden_states(
    params, config, jnp.asarray(tokens)[None], positions[None], causal_attention
  )
  want = hidden[0] @ decoder.lm_head(params, config).T
  got = serving.logits_of(served, config, x).T
  np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-5)


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


@pytest.mark.parametrize('window', [None, 3])
def test_causal_attention_in_query_blocks(window):
  random = np.random.default_rng(0)
  length = 300  # two blocks of queries
  q, k, v = (random.normal(size=(1, length, n, 4)).astype(np.float32) for n in (4, 2, 2))
  got = causal_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), window=window)
  for t in (0, 1, 255, 256, 299):
    start = 0 if window is None else max(0, t + 1 - window)
    for head in range(4):
      scores = k[0, start : t + 1, head // 2].astype(np.float64) @ q[0, t, head] / 2
      weights = np.exp(scores - scores.max())
      want = weights @ v[0, start : t + 1, head // 2] / weights.sum()
      np.testing.assert_allclose(got[0, t, head], want, atol=1e-5)
