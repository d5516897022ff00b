"""The decoder: against a plain numpy float64 forward pass, and its forms against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlax_stack.models import decoder, rope, rotary
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.linear import Linear

CONFIG = ModelConfig(
  vocab_size=97,
  hidden_size=32,
  intermediate_size=48,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  qk_norm=True,
  attention_bias=True,
  tie_embeddings=False,
  max_context=64,
)


def causal(q, k, v):
  """Plain causal attention with grouped queries."""
  groups = q.shape[2] // k.shape[2]
  k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
  scores = jnp.einsum('rqhd,rkhd->rhqk', q, k) * q.shape[-1] ** -0.5
  mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))[None, None]
  return jnp.einsum('rhqk,rkhd->rqhd', jax.nn.softmax(jnp.where(mask, scores, -1e30), -1), v)


@pytest.fixture(scope='module')
def params():
  made = decoder.init_params(CONFIG, jax.random.key(0))
  keys = iter(jax.random.split(jax.random.key(1), 100))
  # Norm scales and biases away from their neutral start, so that the tests see them.
  return jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape) if x.ndim < 3 else x, made
  )


@pytest.fixture(scope='module')
def tokens():
  return jax.random.randint(jax.random.key(2), (2, 12), 0, CONFIG.vocab_size)


def positions_of(tokens):
  return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)


def numpy_forward(params, tokens):
  """The same model in float64 numpy, one sequence, written from the papers."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  config, layers = CONFIG, p['layers']

  def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

  def rotate(x):
    angles = np.arange(len(x))[:, None] * rope.rope_inverse_frequencies(config)[None]
    sin, cos = np.sin(angles)[:, None], np.cos(angles)[:, None]
    a, b = x[..., :4], x[..., 4:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

  x = p['embedder']['embedding'][tokens]
  for i in range(config.num_layers):
    h = norm(x, layers['attn_norm']['scale'][i])
    q, k, v = (
      (h @ layers[f'{n}_proj']['kernel'][i].T + layers[f'{n}_proj']['bias'][i]).reshape(
        len(tokens), -1, config.head_dim
      )
      for n in 'qkv'
    )
    q = rotate(norm(q, layers['q_norm']['scale'][i]))
    k = rotate(norm(k, layers['k_norm']['scale'][i]))
    out = np.zeros_like(q)
    for head in range(config.num_heads):
      scores = q[:, head] @ k[:, head // 2].T / np.sqrt(config.head_dim)
      scores[np.triu_indices(len(tokens), 1)] = -np.inf
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // 2]
    x = x + out.reshape(len(tokens), -1) @ layers['o_proj']['kernel'][i].T
    h = norm(x, layers['mlp_norm']['scale'][i])
    gate, up = (h @ layers[f'{n}_proj']['kernel'][i].T for n in ('gate', 'up'))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layers['down_proj']['kernel'][i].T
  return norm(x, p['final_norm']['scale'])


def test_hidden_states_match_float64_numpy(params, tokens):
  got = jax.jit(lambda p: decoder.hidden_states(p, CONFIG, tokens, positions_of(tokens), causal))(
    params
  )
  want = np.stack([numpy_forward(params, np.asarray(row)) for row in tokens])
  np.testing.assert_allclose(got, want, atol=2e-5)


def test_highest_precision_halves_the_rounding_of_a_product():
  linear = Linear(1000, 8, bias=False, rngs=nnx.Rngs(0))
  x = 1 + jax.random.normal(jax.random.key(1), (64, 1000))
  exact = np.asarray(x, np.float64) @ np.asarray(linear.kernel[...], np.float64).T
  error = {}
  for precision in ('default', 'highest'):
    with jax.default_matmul_precision(precision):
      error[precision] = np.abs(np.asarray(linear(x), np.float64) - exact).mean()
  assert 0 < error['highest'] < 0.7 * error['default'] < 1e-5


def test_abstract_params_have_the_shapes_of_real_ones(params):
  abstract = decoder.abstract_params(CONFIG)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
    lambda x: (x.shape, x.dtype), params
  )


def test_aux_comes_back_per_layer(params, tokens):
  @jax.jit
  def caches(tokens):
    return decoder.hidden_states_and_aux(
      params, CONFIG, tokens, positions_of(tokens), lambda q, k, v: (causal(q, k, v), (k, v))
    )

  _, (keys, values) = caches(tokens)
  assert keys.shape == values.shape == (3, 2, 12, 2, 8)
  # A causal model's keys do not depend on later tokens.
  _, (short, _) = caches(tokens[:, :5])
  np.testing.assert_allclose(keys[:, :, :5], short, atol=1e-5)


def test_head_is_tied_or_not(params):
  assert decoder.lm_head(params, CONFIG) is params['lm_head']['kernel']
  tied = ModelConfig(**{**CONFIG.__dict__, 'tie_embeddings': True})
  assert 'lm_head' not in decoder.abstract_params(tied)
  assert decoder.lm_head(params, tied) is params['embedder']['embedding']


def test_bfloat16_is_near_float32(params, tokens):
  @functools.partial(jax.jit, static_argnums=0)
  def run(dtype):
    return decoder.hidden_states(
      params, CONFIG, tokens, positions_of(tokens), causal, compute_dtype=dtype
    )

  half, full = run(jnp.bfloat16), run(jnp.float32)
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(half.astype(jnp.float32), full, atol=0.15)


def test_rotation_keeps_norms_and_is_relative():
  x = jax.random.normal(jax.random.key(3), (1, 6, 2, 8))
  sin, cos = rotary.rotation(CONFIG, jnp.arange(6)[None])
  turned = rotary.rotate(x, sin, cos)
  np.testing.assert_allclose(
    jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
  )
  same = rotary.rotate(jnp.broadcast_to(x[:, :1], x.shape), sin, cos)
  products = jnp.einsum('rqhd,rkhd->rhqk', same, same)
  np.testing.assert_allclose(products[0, 0, 0, 2], products[0, 0, 3, 5], rtol=1e-5)
