"""Learning rates by hand, which parameters decay, and settings that cannot work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.learner.optimizer import (
  OptimizerSettings,
  decay_mask,
  learning_rate_schedule,
  make_optimizer,
)


def _rates(count, **settings):
  schedule = learning_rate_schedule(OptimizerSettings(learning_rate=8.0, **settings))
  with jax.numpy_dtype_promotion('standard'):
    return [float(schedule(jnp.int32(i))) for i in range(count)]


def test_constant_with_and_without_warm_up():
  assert _rates(3) == [8, 8, 8]
  np.testing.assert_allclose(_rates(6, warmup_steps=4), [2, 4, 6, 8, 8, 8], rtol=1e-6)
  np.testing.assert_allclose(_rates(3, warmup_steps=1), [8, 8, 8], rtol=1e-6)


def test_linear_decay_reaches_the_final_fraction():
  got = _rates(8, warmup_steps=2, decay='linear', total_steps=6, final_fraction=0.5)
  np.testing.assert_allclose(got, [4, 8, 8, 7, 6, 5, 4, 4], rtol=1e-6)


def test_cosine_decay():
  got = _rates(6, decay='cosine', total_steps=4)
  want = [4 * (1 + np.cos(np.pi * i / 4)) for i in range(5)] + [0]
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_norms_and_biases_do_not_decay():
  params = {
    'final_norm': {'scale': jnp.ones(2)},
    'layers': {'q_proj': {'kernel': jnp.ones((1, 2, 2)), 'bias': jnp.ones((1, 2))}},
  }
  assert decay_mask(params) == {
    'final_norm': {'scale': False},
    'layers': {'q_proj': {'kernel': True, 'bias': False}},
  }
  optimizer = make_optimizer(OptimizerSettings(learning_rate=0.5, weight_decay=0.1))
  with jax.numpy_dtype_promotion('standard'):
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
  np.testing.assert_allclose(updates['layers']['q_proj']['kernel'], -0.05, rtol=1e-6)
  assert (updates['final_norm']['scale'] == 0).all()


def test_first_update_of_adam_by_hand():
  optimizer = make_optimizer(OptimizerSettings(learning_rate=0.1, max_grad_norm=5.0, eps=0.5))
  params = {'w': {'kernel': jnp.zeros(2)}}
  with jax.numpy_dtype_promotion('standard'):
    gradient = {'w': {'kernel': jnp.asarray([6.0, -8.0])}}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
  # Clipped to [3, -4]; bias correction makes the moments the gradient and its square.
  np.testing.assert_allclose(updates['w']['kernel'], [-0.3 / 3.5, 0.4 / 4.5], rtol=1e-5)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'decay': 'step'}, 'unknown decay'),
    ({'learning_rate': 0.0}, 'must be > 0'),
    ({'decay': 'linear', 'warmup_steps': 5, 'total_steps': 5}, 'total_steps > warmup_steps'),
  ],
)
def test_bad_settings(change, message):
  with pytest.raises(ConfigError, match=message):
    OptimizerSettings(**({'learning_rate': 1.0} | change))
