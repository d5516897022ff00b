"""Losses and metrics of the router against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.objectives.router import (
  NO_ROUTER_LOSS,
  RouterLoss,
  RouterSums,
  load_balance,
  router_loss,
  router_metrics,
  router_sums,
)

LAYERS, ROWS, TOKENS, EXPERTS, CHOSEN = 2, 3, 5, 4, 2


@pytest.fixture(scope='module')
def drawn():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(LAYERS, ROWS, TOKENS, EXPERTS)).astype(np.float32)
  weight = rng.choice([0.0, 0.5, 1.0], size=(ROWS, TOKENS)).astype(np.float32)
  return logits, np.argsort(-logits, axis=-1)[..., :CHOSEN].astype(np.int32), weight


def _sums(logits, experts, weight, **options):
  layers = zip(logits, experts, strict=True)
  parts = [router_sums(one, chosen, weight, **options) for one, chosen in layers]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def _numpy(logits, experts, weight):
  """load and probability [L, E], entropy and squares [L], token by token in float64."""
  load, probability = np.zeros((LAYERS, EXPERTS)), np.zeros((LAYERS, EXPERTS))
  entropy, square = np.zeros(LAYERS), np.zeros(LAYERS)
  for layer, row, token in np.ndindex(LAYERS, ROWS, TOKENS):
    z, w = logits[layer, row, token].astype(np.float64), weight[row, token]
    p = np.exp(z) / np.exp(z).sum()
    load[layer, experts[layer, row, token]] += w
    probability[layer] += w * p
    entropy[layer] -= w * (p * np.log(p)).sum()
    square[layer] += w * np.log(np.exp(z).sum()) ** 2
  return load, probability, entropy, square


def test_sums_weigh_tokens(drawn):
  got = _sums(*drawn)
  assert isinstance(got, RouterSums) and got.strayed is None
  for one, want in zip(got[:4], _numpy(*drawn), strict=True):
    np.testing.assert_allclose(one, want, rtol=1e-5)


def test_choices_that_stray_are_counted(drawn):
  logits, likeliest, weight = drawn
  replayed = likeliest.copy()
  replayed[1, 0, :, 1] = np.argsort(-logits[1, 0], axis=-1)[:, 2]  # one of two, in a row of a layer
  sums, tokens = _sums(logits, replayed, weight, replayed=True), jnp.float32(weight.sum())
  np.testing.assert_allclose(sums.strayed, [0, weight[0].sum()], rtol=1e-6)
  share = weight[0].sum() / (LAYERS * CHOSEN * weight.sum())
  assert float(router_metrics(sums, tokens)['router_strayed']) == pytest.approx(share)
  assert 'router_strayed' not in router_metrics(_sums(*drawn), tokens)
  np.testing.assert_array_equal(_sums(*drawn, replayed=True).strayed, [0, 0])


def test_losses_are_means_over_tokens_and_layers(drawn):
  sums, tokens = _sums(*drawn), jnp.float32(drawn[2].sum())
  load, probability, _, square = _numpy(*drawn)
  n = float(tokens)
  aux = np.mean([EXPERTS * (load[i] / n * probability[i] / n).sum() for i in range(LAYERS)])
  z = square.mean() / n
  settings = RouterLoss(aux_coef=0.3, z_coef=0.7)
  got = router_loss(settings, sums, sums.load, tokens)
  np.testing.assert_allclose(got, 0.3 * aux + 0.7 * z, rtol=1e-5)
  np.testing.assert_allclose(
    router_loss(RouterLoss(z_coef=0.7), sums, None, tokens), 0.7 * z, rtol=1e-5
  )
  assert float(router_loss(NO_ROUTER_LOSS, sums, None, tokens)) == 0.0


def test_balanced_experts_give_the_experts_of_a_token():
  load = jnp.full((LAYERS, EXPERTS), 10.0 * CHOSEN / EXPERTS)
  probability = jnp.full((LAYERS, EXPERTS), 10.0 / EXPERTS)
  assert float(load_balance(load, probability, jnp.float32(10.0))) == pytest.approx(CHOSEN)
  # All tokens at one pair of experts: E / k times as much.
  skewed = jnp.zeros((LAYERS, EXPERTS)).at[:, :CHOSEN].set(10.0)
  worst = load_balance(skewed, skewed / CHOSEN, jnp.float32(10.0))
  assert float(worst) == pytest.approx(EXPERTS)


def test_gradient_pushes_probability_away_from_busy_experts(drawn):
  logits, experts, weight = drawn

  def loss(logits):
    sums = _sums(logits, experts, weight)
    return load_balance(sums.load, sums.probability, jnp.float32(weight.sum()))

  load, n = _numpy(*drawn)[0], float(weight.sum())
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  f = (load / n)[:, None, None, :]
  # d/dz of Σₑ fₑ pₑ is p (f − Σ f p).
  want = EXPERTS / LAYERS / n * weight[None, ..., None] * p * (f - (f * p).sum(-1, keepdims=True))
  np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(logits)), want, atol=1e-6)


def test_metrics(drawn):
  sums, tokens = _sums(*drawn), jnp.float32(drawn[2].sum())
  load, _, entropy, square = _numpy(*drawn)
  got = router_metrics(sums, tokens)
  relative = load / load.mean(1, keepdims=True)
  assert float(got['expert_load_max']) == pytest.approx(relative.max(), rel=1e-5)
  assert float(got['expert_load_min']) == pytest.approx(relative.min(), rel=1e-5)
  assert float(got['router_entropy']) == pytest.approx(entropy.mean() / float(tokens), rel=1e-5)
  assert float(got['router_z']) == pytest.approx(square.mean() / float(tokens), rel=1e-5)
  assert float(got['router_aux']) == float(load_balance(sums.load, sums.probability, tokens))


@pytest.mark.parametrize('value', [-1.0, float('nan'), float('inf')])
def test_impossible_coefficients_are_refused(value):
  with pytest.raises(ConfigError, match='router_aux_coef'):
    RouterLoss(aux_coef=value)
