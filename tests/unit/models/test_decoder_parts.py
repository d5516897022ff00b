"""The modules that a decoder is made of, each against its formula in numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.decoder import Decoder, DecoderLayer, Embedder
from rlax_stack.models.experts import ExpertLinear
from rlax_stack.models.linear import Linear
from rlax_stack.models.norms import RMSNorm

CONFIG = ModelConfig(
  vocab_size=11,
  hidden_size=8,
  intermediate_size=12,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
)


def _values(*shape):
  return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def _no_rotation(tokens):
  return jnp.zeros((1, tokens, 1, 2), jnp.float32), jnp.ones((1, tokens, 1, 2), jnp.float32)


@pytest.mark.parametrize('bias', [False, True])
def test_linear(bias):
  linear = Linear(3, 5, bias=bias, rngs=nnx.Rngs(0))
  if bias:
    linear.bias[...] = jnp.arange(5, dtype=jnp.float32)
  x = _values(2, 4, 3)
  expected = np.asarray(x) @ np.asarray(linear.kernel[...]).T + (np.arange(5) if bias else 0)
  np.testing.assert_allclose(linear(x), expected, atol=1e-6)
  assert linear(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rms_norm():
  norm = RMSNorm(8, 1e-5)
  norm.scale[...] = jnp.arange(8, dtype=jnp.float32)
  x = 30 * _values(2, 8)
  mean_square = np.mean(np.square(np.asarray(x, np.float64)), -1, keepdims=True)
  expected = np.asarray(x) / np.sqrt(mean_square + 1e-5) * np.arange(8)
  np.testing.assert_allclose(norm(x), expected, rtol=1e-5)


def test_embedder_takes_rows_in_the_dtype_asked_for():
  embedder = Embedder(CONFIG, rngs=nnx.Rngs(0))
  out = embedder(jnp.asarray([[3, 0]], jnp.int32), jnp.bfloat16)
  table = np.asarray(embedder.embedding[...].astype(jnp.bfloat16), np.float32)
  np.testing.assert_array_equal(np.asarray(out, np.float32), table[[[3, 0]]])


def test_decoder_layer_is_a_residual_around_attention_and_mlp():
  layer = DecoderLayer(CONFIG, rngs=nnx.Rngs(0))
  x, seen = _values(1, 3, 8), {}

  def attend(q, k, v):
    seen.update(q=q.shape, k=k.shape, v=v.shape)
    return jnp.zeros_like(q), 'aux'

  layer.down_proj.kernel[...] = jnp.zeros_like(layer.down_proj.kernel[...])
  out, aux = layer(x, *_no_rotation(3), attend)
  np.testing.assert_array_equal(out, x)
  assert aux == 'aux'
  assert seen == {'q': (1, 3, 2, 4), 'k': (1, 3, 1, 4), 'v': (1, 3, 1, 4)}


def test_expert_linear_holds_a_kernel_for_each_expert():
  kernel = np.asarray(ExpertLinear(4, 100, 50, rngs=nnx.Rngs(0)).kernel[...])
  assert kernel.shape == (4, 50, 100)
  assert np.abs(kernel).max() <= 0.2 and kernel.std() == pytest.approx(0.088, rel=0.05)


@pytest.mark.parametrize('normalise', [True, False])
def test_layer_of_experts_adds_those_that_each_token_chose(normalise):
  config = dataclasses.replace(
    CONFIG, num_experts=5, experts_per_token=2, moe_intermediate_size=6, norm_topk_prob=normalise
  )
  layer = DecoderLayer(config, rngs=nnx.Rngs(0))
  assert not hasattr(layer, 'gate_proj')
  x = _values(1, 8, 8)
  out, (aux, seen) = layer(
    x,
    *_no_rotation(8),
    lambda q, k, v: (jnp.zeros_like(q), 'aux'),
    observe=lambda routing: routing.experts,
  )
  assert aux == 'aux'
  names = ('gate', 'up', 'down')
  kernels = [np.asarray(getattr(layer, f'experts_{n}').kernel[...], np.float64) for n in names]
  h = np.asarray(x[0], np.float64)
  h = h / np.sqrt((h**2).mean(-1, keepdims=True) + config.rms_norm_eps)
  p = np.exp(h @ np.asarray(layer.router.kernel[...], np.float64).T)
  p /= p.sum(-1, keepdims=True)
  want = np.asarray(x[0], np.float64)
  for token in range(8):
    chosen = np.argsort(-p[token])[:2]
    np.testing.assert_array_equal(seen[0, token], chosen)
    for e in chosen:
      gate, up = kernels[0][e] @ h[token], kernels[1][e] @ h[token]
      weight = p[token, e] / (p[token, chosen].sum() if normalise else 1.0)
      want[token] += weight * (kernels[2][e] @ (gate / (1 + np.exp(-gate)) * up))
  np.testing.assert_allclose(out[0], want, atol=1e-5)


def test_decoder_scans_its_layers_and_ends_in_the_norm():
  model = Decoder(CONFIG, rngs=nnx.Rngs(0))
  assert model.layers.q_proj.kernel[...].shape == (2, 8, 8)
  tokens = jnp.asarray([[1, 2, 3]], jnp.int32)
  positions = jnp.asarray([[0, 1, 2]], jnp.int32)
  hidden, aux = model(tokens, positions, lambda q, k, v: (jnp.zeros_like(q), v[0, :, 0, 0]))
  assert hidden.shape == (1, 3, 8) and aux.shape == (2, 3)
  np.testing.assert_allclose(np.mean(np.square(hidden), -1), 1.0, rtol=2e-2)
