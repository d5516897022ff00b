"""Adapters: equal to merged weights, nothing when fresh, gradients by the chain rule, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.models import decoder
from rlax_stack.models.adapter import (
  KINDS,
  AdaptedKernel,
  AdapterSettings,
  abstract_weights,
  adapted_leaves,
  adapted_product,
  attach,
  dense,
  init_adapter,
  merge,
  model_weights,
)
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.frozen import freeze

CONFIG = ModelConfig(
  vocab_size=24,
  hidden_size=16,
  intermediate_size=20,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)
ALL = AdapterSettings(kind='lora', rank=3, alpha=6.0, targets=('*_proj/kernel',))


def _params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32),
    decoder.abstract_params(CONFIG),
  )


def _adapter(settings, base, noise=0.1):
  rng = np.random.default_rng(1)
  fresh = init_adapter(CONFIG, settings, base)
  return jax.tree.map(
    lambda leaf: leaf + jnp.asarray(noise * rng.standard_normal(leaf.shape), jnp.float32), fresh
  )


def _hidden(params):
  tokens = jnp.arange(10, dtype=jnp.int32)[None]
  return decoder.hidden_states(params, CONFIG, tokens, tokens, lambda q, k, v: q)


def _by_hand(kind, base, parts, alpha):
  """The merged kernel of one layer in float64."""
  w, b = np.asarray(base, np.float64), np.asarray(parts['lora_b'], np.float64)
  rank = b.shape[1]
  if kind == 'miss':
    delta = np.zeros_like(w)
    for i in range(w.shape[1]):
      delta[:, i] = b[:, i % rank]
    return w + delta
  scale = alpha / (np.sqrt(rank) if kind == 'rslora' else rank)
  w = w + scale * b @ np.asarray(parts['lora_a'], np.float64)
  if kind == 'dora':
    w = np.asarray(parts['magnitude'])[:, None] * w / np.linalg.norm(w, axis=1, keepdims=True)
  return w


@pytest.mark.parametrize('kind', KINDS)
def test_forward_equals_merged_weights_and_merged_weights_the_formula(kind):
  settings, base = dataclasses.replace(ALL, kind=kind), _params()
  adapter = _adapter(settings, base)
  merged = merge(adapter, base, settings)
  np.testing.assert_allclose(
    _hidden(attach(adapter, base, settings)), _hidden(merged), rtol=1e-5, atol=1e-5
  )
  for name in ('q_proj', 'down_proj'):
    for layer in range(2):
      parts = jax.tree.map(lambda x, i=layer: x[i], adapter['layers'][name])
      want = _by_hand(kind, base['layers'][name]['kernel'][layer], parts, settings.alpha)
      np.testing.assert_allclose(merged['layers'][name]['kernel'][layer], want, atol=2e-6)
  np.testing.assert_array_equal(merged['final_norm']['scale'], base['final_norm']['scale'])
  assert {leaf.dtype for leaf in jax.tree.leaves(merge(adapter, base, settings, jnp.bfloat16))} == {
    jnp.dtype(jnp.bfloat16)
  }


@pytest.mark.parametrize('kind', ['lora', 'dora', 'miss'])
def test_a_fresh_adapter_is_the_base(kind):
  settings, base = dataclasses.replace(ALL, kind=kind), _params()
  adapter = init_adapter(CONFIG, settings, base)
  got, want = _hidden(attach(adapter, base, settings)), _hidden(base)
  if kind == 'dora':
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return
  np.testing.assert_array_equal(got, want)
  jax.tree.map(np.testing.assert_array_equal, merge(adapter, base, settings), base)


@pytest.mark.parametrize('kind', ['lora', 'dora', 'miss'])
def test_gradient_is_that_of_the_merged_weights_by_the_chain_rule(kind):
  settings, base = dataclasses.replace(ALL, kind=kind, targets=('*/gate_proj/*',)), _params()
  adapter = _adapter(settings, base)

  def loss(params):
    return jnp.sum(jnp.sin(3 * _hidden(params)))

  got = jax.jit(jax.grad(lambda a: loss(attach(a, base, settings))))(adapter)
  full = jax.jit(jax.grad(loss))(merge(adapter, base, settings))['layers']['gate_proj']['kernel']
  for layer in range(2):
    parts = jax.tree.map(lambda x, i=layer: np.asarray(x[i], np.float64), adapter['layers'])
    parts, grads = parts['gate_proj'], got['layers']['gate_proj']
    d, w = np.asarray(full[layer], np.float64), base['layers']['gate_proj']['kernel'][layer]
    if kind == 'dora':
      bare = _by_hand('lora', w, parts, settings.alpha)
      norm = np.linalg.norm(bare, axis=1, keepdims=True)
      unit, m = bare / norm, parts['magnitude'][:, None]
      np.testing.assert_allclose(grads['magnitude'][layer], (d * unit).sum(1), atol=1e-4, rtol=1e-4)
      d = m / norm * (d - unit * (d * unit).sum(1, keepdims=True))
    if kind == 'miss':
      want = np.stack([d[:, i::3].sum(1) for i in range(3)], axis=1)
      np.testing.assert_allclose(grads['lora_b'][layer], want, atol=1e-4, rtol=1e-4)
      continue
    s = settings.scale
    np.testing.assert_allclose(
      grads['lora_b'][layer], s * d @ parts['lora_a'].T, atol=1e-4, rtol=1e-4
    )
    np.testing.assert_allclose(
      grads['lora_a'][layer], s * parts['lora_b'].T @ d, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(('kind', 'scale'), [('lora', 2.0), ('rslora', 6 / 3**0.5), ('miss', 1.0)])
def test_scale(kind, scale):
  assert dataclasses.replace(ALL, kind=kind).scale == pytest.approx(scale)


def test_targets_by_pattern_and_what_they_may_not_be():
  some = dataclasses.replace(ALL, targets=('*/[qv]_proj/*', '*down*'))
  found = [leaf.path[1] for leaf in adapted_leaves(CONFIG, some)]
  assert found == ['q_proj', 'v_proj', 'down_proj']
  base = _params()
  assert set(init_adapter(CONFIG, some, base)['layers']) == set(found)
  attached = attach(init_adapter(CONFIG, some, base), base, some)
  assert isinstance(attached['layers']['q_proj']['kernel'], AdaptedKernel)
  assert attached['layers']['k_proj']['kernel'] is base['layers']['k_proj']['kernel']
  with pytest.raises(ConfigError, match=r"targets holds '\*experts\*', which matches no kernel"):
    adapted_leaves(CONFIG, dataclasses.replace(ALL, targets=('*q_proj*', '*experts*')))
  with pytest.raises(ConfigError, match='rank=9 exceeds a side of layers/k_proj/kernel, .* 8 x 16'):
    adapted_leaves(CONFIG, dataclasses.replace(ALL, rank=9))


def test_over_quantised_weights_the_merged_ones_are_the_dequantised_with_the_adapter():
  settings = dataclasses.replace(ALL, base='int4')
  base = freeze(_params(), 'int4')
  adapter = _adapter(settings, base)
  attached = attach(adapter, base, settings)
  np.testing.assert_allclose(
    _hidden(attached), _hidden(merge(adapter, base, settings)), rtol=1e-5, atol=1e-5
  )
  kernel = base['layers']['q_proj']['kernel']
  np.testing.assert_array_equal(dense(kernel), kernel.dequantised())
  got = jax.jit(jax.grad(lambda a: jnp.sum(_hidden(attach(a, base, settings)) ** 2)))(adapter)
  plain = dataclasses.replace(settings, base='float32')
  held = merge({}, base, plain)
  want = jax.jit(jax.grad(lambda a: jnp.sum(_hidden(attach(a, held, plain)) ** 2)))(adapter)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_shapes_without_arrays_and_weights_without_an_adapter():
  params = decoder.abstract_params(CONFIG)
  assert abstract_weights(None, CONFIG, params) == (params, ())
  assert model_weights(None, params) is params
  trained, (base,) = abstract_weights(dataclasses.replace(ALL, base='int4'), CONFIG, params)
  assert trained['layers']['down_proj']['lora_a'].shape == (2, 3, 20)
  assert base['layers']['q_proj']['kernel'].values.dtype == jnp.int4
  assert 'lora_a' in trained['layers']['q_proj'] and 'embedder' not in trained


def test_product_of_one_kernel():
  rng = np.random.default_rng(2)
  w, b = rng.standard_normal((4, 5)), rng.standard_normal((4, 2))
  x = jnp.asarray(rng.standard_normal((3, 5)), jnp.float32)
  kernel = AdaptedKernel(jnp.asarray(w), None, jnp.asarray(b, jnp.float32), None, 1.0)
  want = np.asarray(x) @ (w + b[:, [0, 1, 0, 1, 0]]).T
  got = adapted_product(x, kernel, jnp.asarray(np.asarray(x) @ w.T, jnp.float32))
  np.testing.assert_allclose(got, want, atol=1e-5)
