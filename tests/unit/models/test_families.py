"""Phi-3, Gemma 2 and Gemma 3 against a forward pass in float64 numpy, written from their descriptions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack import sharding
from rlax_stack.models import decoder, rotary
from rlax_stack.models.config import ModelConfig, RopeScaling
from rlax_stack.models.norms import RMSNorm, scaled_norm
from rlax_stack.rollout.prefill import attention_rule, causal_attention

_TINY = ModelConfig(
  vocab_size=62,
  hidden_size=24,
  intermediate_size=40,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rms_norm_eps=1e-6,
)
_GEMMA = {
  'activation': 'gelu_tanh',
  'post_norms': True,
  'unit_offset_norms': True,
  'scale_embeddings': True,
  'sliding_window': 5,
}
_FAMILIES = {
  'phi3': {
    'partial_rotary_factor': 0.5,
    'sliding_window': 7,
    'tie_embeddings': False,
    'rope_scaling': RopeScaling(kind='factors', factors=(1.0, 4.0), attention_factor=1.2),
  },
  'gemma2': {
    **_GEMMA,
    'global_layers': (1, 3),
    'query_pre_attn_scalar': 6,
    'attention_soft_cap': 2.0,
    'final_soft_cap': 3.0,
  },
  'gemma3': {
    **_GEMMA,
    'global_layers': (2,),
    'qk_norm': True,
    'rope_theta': 100.0,
    'local_rope_theta': 10.0,
    'rope_scaling': RopeScaling(kind='linear', factor=4.0),
  },
}


def _params(config, seed=0):
  """Scales and kernels away from neutral, so that a wrong one shows."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    wide = 0.5 if path[-1].key == 'scale' else 1.5 * leaf.shape[-1] ** -0.5
    start = 1.0 if path[-1].key == 'scale' and not config.unit_offset_norms else 0.0
    return jnp.asarray(start + wide * rng.standard_normal(leaf.shape), jnp.float32)

  return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(config))


class _Reference:
  """One sequence, one token and one head at a time."""

  def __init__(self, config, params):
    self.config = config
    self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  def norm(self, x, scale):
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)
    return normed * (scale + (1 if self.config.unit_offset_norms else 0))

  def turned(self, x, theta, scaling):
    """x [T, heads, Dh]: the first part of each head as complex numbers."""
    part = int(self.config.head_dim * self.config.partial_rotary_factor) // 2
    angles = theta ** (-np.arange(part) / part)
    factor = 1.0
    if scaling is not None:
      angles = angles / (scaling.factors or scaling.factor)
      factor = scaling.attention_factor
    z = (x[..., :part] + 1j * x[..., part : 2 * part]) * factor
    z = z * np.exp(1j * np.arange(len(x))[:, None] * angles[None])[:, None]
    return np.concatenate((z.real, z.imag, x[..., 2 * part :]), -1)

  def attention(self, layer, h):
    config, weights = self.config, self.params['layers']
    q, k, v = (
      (h @ weights[f'{n}_proj']['kernel'][layer].T).reshape(len(h), -1, config.head_dim)
      for n in 'qkv'
    )
    if config.qk_norm:
      q, k = (self.norm(x, weights[f'{n}_norm']['scale'][layer]) for n, x in (('q', q), ('k', k)))
    whole = config.sliding_window is None or layer in config.global_layers
    local = config.local_rope_theta is not None and not whole
    theta = config.local_rope_theta if local else config.rope_theta
    q, k = (self.turned(x, theta, None if local else config.rope_scaling) for x in (q, k))
    out = np.zeros_like(q)
    divisor = np.sqrt(config.query_pre_attn_scalar or config.head_dim)
    for t in range(len(h)):
      first = 0 if whole else max(0, t + 1 - config.sliding_window)
      for head in range(config.num_heads):
        scores = k[first : t + 1, head // 2] @ q[t, head] / divisor
        if config.attention_soft_cap:
          scores = config.attention_soft_cap * np.tanh(scores / config.attention_soft_cap)
        shares = np.exp(scores - scores.max())
        out[t, head] = shares / shares.sum() @ v[first : t + 1, head // 2]
    return out.reshape(len(h), -1) @ weights['o_proj']['kernel'][layer].T

  def mlp(self, layer, h):
    weights = self.params['layers']
    gate, up = (h @ weights[f'{n}_proj']['kernel'][layer].T for n in ('gate', 'up'))
    if self.config.activation == 'gelu_tanh':
      gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
      gate = gate / (1 + np.exp(-gate))
    return (gate * up) @ weights['down_proj']['kernel'][layer].T

  def logits(self, tokens):
    config, weights = self.config, self.params['layers']
    x = self.params['embedder']['embedding'][tokens]
    if config.scale_embeddings:
      x = x * np.sqrt(config.hidden_size)
    for layer in range(config.num_layers):
      for name, block in (('attn', self.attention), ('mlp', self.mlp)):
        y = block(layer, self.norm(x, weights[f'{name}_norm']['scale'][layer]))
        if config.post_norms:
          y = self.norm(y, weights[f'post_{name}_norm']['scale'][layer])
        x = x + y
    head = self.params['embedder']['embedding']
    if not config.tie_embeddings:
      head = self.params['lm_head']['kernel']
    logits = self.norm(x, self.params['final_norm']['scale']) @ head.T
    cap = config.final_soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


def _logits(config, params, tokens, dtype=jnp.float32):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)

  def attend(q, k, v, **kind):
    assert set(kind) == ({'sees_all'} if config.global_layers else set())
    return causal_attention(q, k, v, attention_rule(config, **kind))

  hidden = decoder.hidden_states(params, config, tokens, positions, attend, compute_dtype=dtype)
  head = decoder.lm_head(params, config).astype(hidden.dtype)
  product = jnp.einsum('rtd,vd->rtv', hidden, head, preferred_element_type=jnp.float32)
  return decoder.capped(config, product)


@pytest.mark.parametrize('name', _FAMILIES)
def test_logits_match_float64_numpy(name):
  config = dataclasses.replace(_TINY, **_FAMILIES[name])
  params = _params(config)
  tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 17)).astype(np.int32)
  reference = _Reference(config, params)
  want = np.stack([reference.logits(row) for row in tokens])
  got = jax.jit(_logits, static_argnums=(0, 3))(config, params, tokens)
  np.testing.assert_allclose(got, want, atol=2e-4)
  assert np.abs(want).max() > 1
  half = jax.jit(_logits, static_argnums=(0, 3))(config, params, tokens, jnp.bfloat16)
  assert np.abs(half - want).mean() < 0.1 * np.abs(want).mean()


@pytest.mark.parametrize('name', _FAMILIES)
def test_every_feature_changes_the_logits(name):
  """What a field turns on is not lost on the way."""
  config = dataclasses.replace(_TINY, **_FAMILIES[name])
  params = _params(config)
  tokens = np.random.default_rng(1).integers(0, config.vocab_size, (1, 17)).astype(np.int32)
  base = np.asarray(_logits(config, params, tokens))
  plain = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
  structural = {'tie_embeddings', 'post_norms', 'qk_norm', 'sliding_window', 'rope_theta'}
  for field in set(_FAMILIES[name]) - structural:
    changes = {field: plain[field]}
    if field == 'global_layers':
      changes['local_rope_theta'] = None
    if field == 'partial_rotary_factor':
      changes['rope_scaling'] = None
    other = np.asarray(_logits(dataclasses.replace(config, **changes), params, tokens))
    assert np.abs(other - base).max() > 1e-3, field


def test_embeddings_are_scaled_in_the_compute_dtype():
  config = dataclasses.replace(_TINY, hidden_size=48, scale_embeddings=True)
  table = jnp.asarray(np.random.default_rng(0).standard_normal((62, 48)), jnp.float32)
  params, tokens = {'embedder': {'embedding': table}}, jnp.asarray([3, 60], jnp.int32)
  got = decoder.embed(params, config, tokens, jnp.bfloat16)
  assert got.dtype == jnp.bfloat16
  factor = jnp.asarray(48**0.5, jnp.bfloat16)
  assert float(factor) == 6.9375  # not 6.9282
  np.testing.assert_array_equal(got, table[tokens].astype(jnp.bfloat16) * factor)
  plain = decoder.embed(params, dataclasses.replace(config, scale_embeddings=False), tokens, 'f4')
  np.testing.assert_array_equal(plain, table[tokens])


def test_unit_offset_norm_is_rounded_once():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16)), jnp.bfloat16)
  scale = jnp.asarray(np.random.default_rng(1).standard_normal(16), jnp.float32)
  norm = RMSNorm(16, 1e-6, unit_offset=True)
  np.testing.assert_array_equal(norm.scale[...], 0)
  norm.scale[...] = scale
  wide = np.asarray(x, np.float64)
  normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
  exact = normed * (1 + np.asarray(scale.astype(jnp.bfloat16), np.float64))
  np.testing.assert_allclose(np.asarray(norm(x), np.float64), exact, rtol=2**-8)
  got = scaled_norm(jnp.asarray(normed, jnp.float32), scale[None], unit_offset=True)
  np.testing.assert_allclose(got, normed * (1 + np.asarray(scale, np.float64)), rtol=1e-6)


def test_activations_of_the_gate():
  x = jnp.asarray([-2.0, 0.0, 0.5, 3.0], jnp.float32)
  wide = np.asarray(x, np.float64)
  tanh = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
  np.testing.assert_allclose(decoder.ACTIVATIONS['gelu_tanh'](x), tanh, atol=1e-6)
  np.testing.assert_allclose(decoder.ACTIVATIONS['silu'](x), wide / (1 + np.exp(-wide)), atol=1e-6)


def test_layers_that_see_all():
  config = dataclasses.replace(_TINY, **_FAMILIES['gemma2'])
  np.testing.assert_array_equal(decoder.layers_that_see_all(config), [False, True, False, True])
  assert decoder.layers_that_see_all(dataclasses.replace(config, global_layers=())) is None
  yes, no = (jnp.ones(2), jnp.zeros((1, 3))), (jnp.full(2, 5.0), jnp.full((1, 3), 6.0))
  for which, want in ((True, yes), (False, no)):
    jax.tree.map(np.testing.assert_array_equal, decoder.select(jnp.asarray(which), yes, no), want)


def test_features_past_the_rotary_ones_stay():
  config = dataclasses.replace(_TINY, **_FAMILIES['phi3'])
  x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 2, 8)), jnp.float32)
  sin, cos = rotary.rotation(config, jnp.arange(6, dtype=jnp.int32)[None])
  turned = rotary.rotate(x, sin, cos)
  np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
  norms = np.linalg.norm(turned[..., :4], axis=-1)
  np.testing.assert_allclose(norms, 1.2 * np.linalg.norm(x[..., :4], axis=-1), rtol=1e-5)


def test_sine_and_cosine_of_local_layers_are_not_scaled():
  config = dataclasses.replace(_TINY, **_FAMILIES['phi3'])
  angles = jnp.asarray([0.0, 0.5], jnp.float32)
  for local, factor in ((False, 1.2), (True, 1.0)):
    sin, cos = rotary.sine_and_cosine(config, angles, local=local)
    np.testing.assert_allclose(sin, factor * np.sin([0.0, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(cos, factor * np.cos([0.0, 0.5]), rtol=1e-6)


@pytest.mark.parametrize('name', _FAMILIES)
def test_every_parameter_has_a_place_on_a_mesh(name):
  config = dataclasses.replace(_TINY, **_FAMILIES[name])
  mesh = sharding.make_mesh({'fsdp': 2, 'tensor': 2}, jax.devices()[:4])
  abstract = decoder.abstract_params(config)
  specs = jax.tree.map(lambda x: x.spec, sharding.param_shardings(abstract, mesh))
  assert jax.tree.structure(specs) == jax.tree.structure(abstract)
