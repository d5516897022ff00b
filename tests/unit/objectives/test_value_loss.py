"""The loss of values: by hand, where the clip takes the gradient, masks, and what is measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives.critics import networks
from rlax_stack.objectives.critics.value_loss import value_loss, value_metrics
from rlax_stack.objectives.objective import resolve

_NAN = float('nan')


def _loss(value, start, target, mask, text='separate', tokens=None):
  settings = resolve(advantage='gae', critic=text).critic_settings
  arrays = [jnp.asarray([x], jnp.float32) for x in (value, start, target)]
  mask = jnp.asarray([mask], bool)
  tokens = jnp.float32(np.sum(np.asarray(mask)) if tokens is None else tokens)

  def total(value):
    parts = value_loss(settings, value, *arrays[1:], mask, tokens)
    return parts.loss, parts.means

  (loss, means), gradient = jax.value_and_grad(total, has_aux=True)(arrays[0])
  found = {name: float(pair.numerator / pair.denominator) for name, pair in means.items()}
  return float(loss), np.asarray(gradient[0]), found


def test_half_the_mean_square_times_the_coefficient():
  value, target = [1.0, 2.0, _NAN], [0.0, 4.0, _NAN]
  loss, gradient, means = _loss(value, value, target, [1, 1, 0], 'separate(coef=3.0)')
  assert loss == pytest.approx(3.0 * 0.5 * (1 + 4) / 2)
  np.testing.assert_allclose(gradient, [1.5, -3.0, 0.0])
  assert means['value_loss'] == pytest.approx(0.5 * (1 + 4) / 2)
  assert means['value_clip_fraction'] == 0.0
  # A micro-batch is divided by the tokens of the whole batch.
  assert _loss(value, value, target, [1, 1, 0], tokens=10)[0] == pytest.approx(0.5 * 5 / 10)


def test_clipped_values_take_the_larger_square_and_lose_their_gradient():
  # Start 0, δ 0.5: moved too far towards the target; too far beyond it; too far away; not too far.
  value, target = [0.8, 0.9, -0.7, 0.3], [1.0, 0.1, 1.0, 1.0]
  loss, gradient, means = _loss(value, [0.0] * 4, target, [1] * 4, 'separate(delta_value=0.5)')
  plain = np.square(np.subtract(value, target))
  bounded = np.square(np.subtract(np.clip(value, -0.5, 0.5), target))
  assert loss == pytest.approx(0.5 * np.maximum(plain, bounded).mean())
  np.testing.assert_allclose(gradient, np.array([0.0, 0.8, -1.7, -0.7]) / 4, rtol=1e-6)
  assert means['value_clip_fraction'] == 0.25
  assert means['value_loss'] == pytest.approx(loss)


def test_gradient_is_that_of_finite_differences():
  rng = np.random.default_rng(0)
  value, start, target = rng.standard_normal((3, 40))
  mask, text = rng.random(40) < 0.8, 'shared_trunk(coef=0.7, delta_value=0.3)'
  _, gradient, _ = _loss(value, start, target, mask, text)
  for index in range(0, 40, 5):
    step = 1e-2 * (np.arange(40) == index)
    high, low = (_loss(value + sign * step, start, target, mask, text)[0] for sign in (1, -1))
    assert gradient[index] == pytest.approx((high - low) / 2e-2, abs=2e-4)


def test_masked_nan_and_infinity_change_nothing():
  value, start, target = [1.0, 2.0], [0.5, 1.5], [0.0, 3.0]
  text = 'separate(delta_value=0.2)'
  want = _loss(value, start, target, [1, 1], text)
  for bad in (_NAN, float('inf')):
    got = _loss([*value, bad], [*start, bad], [*target, bad], [1, 1, 0], text)
    assert got[0] == want[0] and got[2] == want[2]
    np.testing.assert_array_equal(got[1], [*want[1], 0.0])


def test_no_gradient_flows_into_targets_and_start():
  settings = networks.CriticSettings(**networks.separate(delta_value=0.1).__dict__)
  ones = jnp.ones((1, 3))

  def total(start, target):
    return value_loss(settings, 2 * ones, start, target, ones > 0, jnp.float32(3)).loss

  for gradient in jax.grad(total, (0, 1))(ones, 3 * ones):
    np.testing.assert_array_equal(gradient, 0.0)


def test_explained_variance():
  rng = np.random.default_rng(1)
  value, target = rng.standard_normal((2, 3, 2, 20)).astype(np.float32)
  mask = rng.random((3, 2, 20)) < 0.7
  poisoned = [jnp.asarray(np.where(mask, x, _NAN)) for x in (value, target)]
  found = value_metrics(*poisoned, jnp.asarray(mask))
  v, t = value[mask].astype(np.float64), target[mask].astype(np.float64)
  assert found['explained_variance'] == pytest.approx(1 - (t - v).var() / t.var(), rel=1e-5)
  assert found['value_mean'] == pytest.approx(v.mean(), rel=1e-5)
  assert found['value_target_mean'] == pytest.approx(t.mean(), rel=1e-5)
  assert value_metrics(poisoned[1], poisoned[1], jnp.asarray(mask))['explained_variance'] == 1.0
  level = jnp.ones(mask.shape)
  assert value_metrics(poisoned[0], level, jnp.asarray(mask))['explained_variance'] == 0.0


def test_boxes_say_what_their_options_are():
  shared = networks.shared_trunk(trunk_coef=0.25, learning_rate=1e-3, pretrain_updates=2)
  assert shared.shared and (shared.trunk_coef, shared.learning_rate) == (0.25, 1e-3)
  assert (shared.updates, shared.pretrain_updates, shared.bootstrap) == (1, 2, True)
  own = networks.separate(updates=3, freeze_attention=True, bootstrap=False, warm_start='x')
  assert not own.shared and (own.updates, own.freeze_attention, own.warm_start) == (3, True, 'x')
  assert not own.bootstrap and own.trunk_coef == 0.0
