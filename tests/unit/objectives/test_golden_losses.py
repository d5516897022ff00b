"""Values and gradients of every objective against constants of the float64 script beside it."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives import aggregation, kl, loss, trust_region
from rlax_stack.objectives.advantages import batch_advantages

_SCRIPT = runpy.run_path(str(pathlib.Path(__file__).with_name('golden_losses.py')))
_MASK = jnp.asarray(_SCRIPT['MASK'])

_ADVANTAGES = {
  'std': [0.70710578, -0.70710578, 0.70710478, -0.70710478],
  'center': [0.5, -0.5, 0.25, -0.25],
  'leave_one_out': [1.0, -1.0, 0.5, -0.5],
}

# value, then the gradient over the 12 valid tokens in row order
_GOLDEN = {
  'clip_0.2_0.2_sequence_mean': """+0.02475645 -0.06512 -0.04365 -0.05893 +0.03618 +0.05966 +0.03999
    +0.07286 +0.00000 -0.03950 -0.06512 +0.00000 +0.08839""",
  'clip_0.2_0.28_token_mean': """+0.03657327 -0.06512 -0.04365 -0.05893 +0.04824 +0.07954 +0.05332
    +0.09715 +0.00000 -0.03950 -0.06512 +0.00000 +0.05893""",
  'bypass': """+0.05051805 -0.06195 -0.05332 -0.06195 +0.04824 +0.07197 +0.08791
    +0.09715 +0.00000 -0.04365 -0.05893 +0.00000 +0.05332""",
  'decoupled': """+0.05419655 -0.06195 -0.05332 -0.06195 +0.04824 +0.07197 +0.08791
    +0.09715 +0.00000 -0.04365 -0.05893 +0.00000 +0.05332""",
  'decoupled_cap_1.2': """+0.03120593 -0.06195 -0.05238 -0.06195 +0.04824 +0.07197 +0.06398
    +0.09715 +0.00000 -0.04365 -0.05893 +0.00000 +0.05332""",
  'k1': '-0.07500000' + ' +0.08333' * 12,
  'k2': """+0.02458333 +0.00833 -0.00833 +0.00833 +0.00833 +0.00000 -0.02500
    +0.00833 +0.00833 -0.01667 +0.00000 -0.05000 -0.01667""",
  'k3': """+0.02867843 +0.00793 -0.00876 +0.00793 +0.00793 +0.00000 -0.02915
    +0.00793 +0.00793 -0.01845 +0.00000 -0.06851 -0.01845""",
  'k3_plus': """+0.02867843 +0.00833 -0.00833 +0.00833 +0.00833 +0.00000 -0.02500
    +0.00833 +0.00833 -0.01667 +0.00000 -0.05000 -0.01667""",
}


def _golden(name):
  numbers = np.array(_GOLDEN[name].split(), np.float64)
  return numbers[0], numbers[1:]


def _table(name, masked):
  """One of the script's tables in float32, with `masked` where the mask is off."""
  return jnp.where(_MASK, jnp.asarray(_SCRIPT[name], jnp.float32), jnp.float32(masked))


def _policy(current, *, masked, low=0.2, high=0.28, how='token_mean', base='PROXIMAL', cap=None):
  adv = batch_advantages(_SCRIPT['REWARDS'], _SCRIPT['GROUPS'], estimator='std')
  rows = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32)[:, None], (4, 4))
  weight = aggregation.token_weights(_MASK, rows, aggregation=how, num_trajectories=4)
  inputs = loss.LossInputs(
    log_probs_t=current,
    entropy_t=jnp.full((4, 4), masked, jnp.float32),
    proximal_log_probs_t=_table(base, masked),
    behaviour_log_probs_t=_table('BEHAVIOUR', masked),
    anchor_log_probs_t=_table('ANCHOR', masked),
    adv_t=jnp.where(_MASK, jnp.asarray(adv)[:, None], jnp.float32(masked)),
    mask_t=_MASK,
    weight_t=weight,
  )
  denominators = loss.Denominators(policy=jnp.sum(weight), tokens=jnp.float32(12))
  return loss.policy_loss(
    inputs, denominators, clip_low=low, clip_high=high, correction_cap=cap
  ).loss


def _kl(current, *, masked, estimator):
  value = kl.kl_estimate(current, _table('ANCHOR', masked), _MASK, estimator=estimator)
  return aggregation.masked_mean(value, _MASK).numerator / 12


_UNDER_TEST = {
  'clip_0.2_0.2_sequence_mean': (_policy, {'high': 0.2, 'how': 'sequence_mean'}),
  'clip_0.2_0.28_token_mean': (_policy, {}),
  'bypass': (_policy, {'base': 'BEHAVIOUR'}),
  'decoupled': (_policy, {'cap': 1e9}),
  'decoupled_cap_1.2': (_policy, {'cap': 1.2}),
} | {name: (_kl, {'estimator': name}) for name in kl.KL_ESTIMATORS}


@pytest.mark.parametrize('masked', [-50.0, float('nan'), float('inf')])
@pytest.mark.parametrize('name', sorted(_GOLDEN))
def test_value_and_gradient(name, masked):
  function, settings = _UNDER_TEST[name]
  current = _table('CURRENT', masked)
  value, gradient = jax.value_and_grad(lambda c: function(c, masked=masked, **settings))(current)
  want_value, want_gradient = _golden(name)
  assert float(value) == pytest.approx(want_value, abs=1e-7)
  np.testing.assert_allclose(np.asarray(gradient)[np.asarray(_MASK)], want_gradient, atol=6e-6)
  assert (np.asarray(gradient)[~np.asarray(_MASK)] == 0).all()


@pytest.mark.parametrize('name', sorted(_GOLDEN))
def test_constants_are_what_the_script_says(name):
  value, gradient = _SCRIPT['value_and_gradient'](_SCRIPT['LOSSES'][name])
  want_value, want_gradient = _golden(name)
  assert value == pytest.approx(want_value, abs=6e-9)
  np.testing.assert_allclose(gradient, want_gradient, atol=6e-6)


@pytest.mark.parametrize('estimator', sorted(_ADVANTAGES))
def test_advantages(estimator):
  got = batch_advantages(_SCRIPT['REWARDS'], _SCRIPT['GROUPS'], estimator=estimator)
  np.testing.assert_allclose(got, _ADVANTAGES[estimator], atol=1e-7)
  np.testing.assert_allclose(got, _SCRIPT['advantages'](estimator), atol=1e-7)


def test_decoupled_equals_bypass_where_nothing_is_clipped():
  current = _table('CURRENT', 0.0)
  wide = {'low': 1.0, 'high': 1e9, 'masked': 0.0}
  decoupled = jax.value_and_grad(lambda c: _policy(c, cap=1e9, **wide))(current)
  bypass = jax.value_and_grad(lambda c: _policy(c, base='BEHAVIOUR', **wide))(current)
  np.testing.assert_allclose(decoupled[0], bypass[0], rtol=1e-6)
  np.testing.assert_allclose(decoupled[1], bypass[1], rtol=1e-5)


def test_clip_off_on_policy_is_reinforce():
  current = _table('CURRENT', 0.0)
  adv = jnp.broadcast_to(jnp.asarray([0.5, -0.5, 0.25, -0.25])[:, None], (4, 4))

  def surrogate(c):
    out = trust_region.ppo_clip(c, c, adv, _MASK)
    return jnp.sum(out.loss_t)

  gradient = jax.grad(surrogate)(current)
  np.testing.assert_array_equal(gradient, jnp.where(_MASK, -adv, 0.0))
