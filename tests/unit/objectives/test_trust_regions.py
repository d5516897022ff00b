"""Trust regions beyond the clip: values and gradients of numpy float64, written from the formulas.

The tables are those of golden_losses.py; gradients by central differences, with what is held under
stop_gradient computed from a copy. Names without brackets are also the boxes of the recipes.
"""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives import metrics
from rlax_stack.objectives.inputs import LossInputs
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.trust_regions import balanced, covariance, soft

_SCRIPT = runpy.run_path(str(pathlib.Path(__file__).with_name('golden_losses.py')))
_MASK, _N = _SCRIPT['MASK'], _SCRIPT['N']
_CENTRE, _STD, _PROXIMAL = _SCRIPT['CENTRE'], _SCRIPT['STD'], _SCRIPT['PROXIMAL']
_log_of, _aggregate = _SCRIPT['log_of'], _SCRIPT['aggregate']


def _sapo(current, held):
  tau = np.where(_STD > 0, 1.0, 1.05)
  gate = 4 / tau / (1 + np.exp(-tau * (np.exp(_log_of(current, _PROXIMAL)) - 1)))
  return _aggregate(-_STD * gate, 'sequence_mean')


def _spo(current, held):
  ratio = np.exp(_log_of(current, _PROXIMAL))
  return _aggregate(-ratio * _STD + abs(_STD) / 0.4 * (ratio - 1) ** 2, 'token_mean')


def _topr(level):
  def loss(current, held):
    log_ratio = _log_of(held, _PROXIMAL)
    if level == 'sequence':
      log_ratio = np.broadcast_to(log_ratio.sum(1, keepdims=True), log_ratio.shape)
    weight = np.where(_CENTRE < 0, np.clip(np.exp(log_ratio), 0, 1), 1.0)
    return _aggregate(-weight * _CENTRE * current, 'token_mean')

  return loss


def _squared(level):
  def loss(current, held):
    d = _log_of(current, _PROXIMAL)
    linear = _aggregate(-_CENTRE * current, 'sequence_sum')
    if level == 'token':
      return linear + _aggregate(0.05 * d**2, 'sequence_sum')
    return linear + np.mean(0.05 * d.sum(1) ** 2)

  return loss


def _double_sided(current, held):
  ratio = np.exp(_log_of(held, _PROXIMAL))
  weight = np.where((ratio > 0.8) & (ratio < 1.2), ratio, 0.0)
  return _aggregate(-weight * _STD * current, 'token_mean')


def _dppo_tv(current, held):
  base = _SCRIPT['BEHAVIOUR']
  moved = np.exp(held) - np.exp(base)
  keep = ~(((_STD > 0) & (moved > 0.2)) | ((_STD < 0) & (-moved > 0.1)))
  return _aggregate(-np.where(keep, np.exp(_log_of(current, base)), 0) * _STD, 'token_mean')


def _dppo_kl(current, held):
  p, b = np.exp(held), np.exp(_SCRIPT['BEHAVIOUR'])
  kl = b * np.log(b / p) + (1 - b) * np.log((1 - b) / (1 - p))
  keep = ~((kl > 0.02) & ((p - b) * _STD > 0))
  ratio = np.exp(_log_of(current, _SCRIPT['BEHAVIOUR']))
  return _aggregate(-np.where(keep, ratio, 0) * _STD, 'token_mean')


def _covariances(held):
  adv = np.broadcast_to(_STD, held.shape)
  return (adv - adv[_MASK].mean()) * (held - held[_MASK].mean())


def _kl_cov(current, held):
  cov = np.where(_MASK, _covariances(held), -np.inf)
  chosen = cov >= np.sort(cov[_MASK])[-4]  # 0.35 of 12 tokens
  d = _log_of(current, _PROXIMAL)
  return _aggregate(-np.exp(d) * _STD + 0.5 * chosen * abs(d), 'token_mean')


def _clip_cov(current, held):
  """All that may be chosen are: the fraction is 1."""
  cov, d, rho = _covariances(held), _log_of(current, _PROXIMAL), np.exp(_log_of(held, _PROXIMAL))
  free = ~(((_STD > 0) & (rho > 1.2)) | ((_STD < 0) & (rho < 0.8)))
  chosen = (cov > 0.1) & (cov < 0.4) & free
  table = _SCRIPT['clipped'](np.exp(d), _STD, 0.2, 0.2)
  return _aggregate(np.where(chosen, 0, table), 'token_mean')


def _bapo(current, held):
  adv, low, high = np.where(_MASK, _STD, 0.0), 0.6, 1.1
  ratio = np.exp(_log_of(held, _PROXIMAL))

  def share(low, high):
    negative = (np.maximum(ratio, low) * -adv)[adv < 0].sum()
    return (np.minimum(ratio, high) * adv)[adv > 0].sum() / negative

  while share(low, high) < 0.9 and low < 0.8 - 1e-9:
    low += 0.1
  while share(low, high) < 0.9 and high < 2.0 - 1e-9:
    high += 0.1
  assert (round(low, 6), round(high, 6)) == (0.8, 1.3)
  ratio = np.exp(_log_of(current, _PROXIMAL))
  return _aggregate(np.maximum(-_STD * ratio, -_STD * np.clip(ratio, low, high)), 'token_mean')


_BEHAVIOUR = {'ratio': 'token(base="behaviour")'}
_SUM = {'advantage': 'group_center', 'aggregation': 'sequence_sum'}
# name: the loss in numpy, the boxes, and where the reference page has one its value
_CASES = {
  'sapo': (_sapo, {'trust_region': 'sapo', 'aggregation': 'sequence_mean'}, -0.03208226),
  'spo': (_spo, {'trust_region': 'spo(delta=0.2)'}, None),
  'topr': (_topr('sequence'), {'trust_region': 'topr', 'advantage': 'group_center'}, None),
  'topr(token)': (
    _topr('token'),
    {'trust_region': 'topr(level="token")', 'advantage': 'group_center'},
    None,
  ),
  'kimi_k1_5': (_squared('sequence'), {'trust_region': 'squared(tau=0.1)'} | _SUM, None),
  'squared(token)': (
    _squared('token'),
    {'trust_region': 'squared(tau=0.1, level="token")'} | _SUM,
    -0.144875,
  ),
  'sao_double_sided': (
    _double_sided,
    {'trust_region': 'double_sided(delta_low=0.2, delta_high=0.2)'},
    None,
  ),
  'dppo_tv': (
    _dppo_tv,
    {'trust_region': 'dppo_tv(delta_low=0.1, delta_high=0.2)'} | _BEHAVIOUR,
    0.07421114,
  ),
  'dppo_kl': (
    _dppo_kl,
    {'trust_region': 'dppo_kl(delta_low=0.02, delta_high=0.02)'} | _BEHAVIOUR,
    None,
  ),
  'kl_cov': (_kl_cov, {'trust_region': 'kl_cov(fraction=0.35, coef=0.5)'}, None),
  'clip_cov': (
    _clip_cov,
    {'trust_region': 'clip_cov(fraction=1, absolute_low=0.1, absolute_high=0.4)'},
    None,
  ),
  'bapo': (
    _bapo,
    {
      'trust_region': 'bapo(target=0.9, absolute_low_end=0.8, absolute_low_step=0.1, '
      'absolute_high_start=1.1, absolute_high_end=2)'
    },
    None,
  ),
}


def _inputs(current, adv):
  """LossInputs of the script's tables, NaN where the mask is off."""

  def table(value):
    return jnp.asarray(np.where(_MASK, value, np.nan), jnp.float32)[None]

  rows = jnp.asarray(np.where(_MASK, np.arange(4)[:, None], -1), jnp.int32)[None]
  return LossInputs(
    log_probs_t=jnp.where(_MASK, current, jnp.nan)[None],
    entropy_t=table(0.0),
    proximal_log_probs_t=table(_PROXIMAL),
    behaviour_log_probs_t=table(_SCRIPT['BEHAVIOUR']),
    anchor_log_probs_t=table(_SCRIPT['ANCHOR']),
    adv_t=table(adv),
    reward_t=table(_SCRIPT['REWARDS'][:, None]),
    mask_t=jnp.asarray(_MASK)[None],
    weight_t=table(0.0),
    trajectory_t=rows,
    group_t=rows // 2,
    turn_t=rows * 0,
    version_t=rows * 0,
    staleness_t=rows * 0,
  )


@pytest.mark.parametrize('name', sorted(_CASES))
def test_value_and_gradient(name, whole_loss):
  loss, boxes, known = _CASES[name]
  objective = resolve(**({'advantage': 'group_std', 'corrections': (), 'max_tokens': 4} | boxes))
  adv = _CENTRE if objective.advantage.name == 'group_center' else _STD

  @jax.jit
  def evaluate(current):
    return jax.value_and_grad(lambda x: whole_loss(objective, _inputs(x, adv)).loss)(current)

  value, gradient = evaluate(jnp.asarray(_SCRIPT['CURRENT'], jnp.float32))
  want_value, want_gradient = _SCRIPT['value_and_gradient'](loss)
  if known is not None:
    assert want_value == pytest.approx(known, abs=6e-9)
  assert float(value) == pytest.approx(want_value, abs=3e-7)
  np.testing.assert_allclose(np.asarray(gradient)[_MASK], want_gradient, atol=6e-6)
  assert (np.asarray(gradient)[~_MASK] == 0).all()


def _gradient(whole_loss, inputs, **boxes):
  objective = resolve(**({'corrections': ()} | boxes))
  return jax.grad(lambda x: whole_loss(objective, inputs._replace(log_probs_t=x)).loss)(
    inputs.log_probs_t
  )


@pytest.mark.parametrize(
  'name',
  ['sapo', 'spo', 'topr', 'double_sided', 'squared', 'dppo_tv', 'dppo_kl', 'kl_cov', 'bapo'],
)
def test_on_policy_it_is_reinforce(name, whole_loss, make_inputs):
  inputs = make_inputs(seed=8)
  inputs = inputs._replace(proximal_log_probs_t=inputs.log_probs_t)
  want = _gradient(whole_loss, inputs, trust_region='reinforce')
  got = _gradient(whole_loss, inputs, trust_region=name)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)


def test_where_no_bound_holds_every_mask_is_the_plain_surrogate(whole_loss, make_inputs):
  inputs = make_inputs(seed=9)
  want = _gradient(whole_loss, inputs, trust_region='none')
  wide = (
    'dppo_tv(delta_low=1, delta_high=1)',
    'dppo_kl(delta_low=99, delta_high=99)',
    'double_sided(delta_low=1, delta_high=99)',
    'bapo(absolute_low_start=0, absolute_low_end=0, absolute_high_start=99, absolute_high_end=99)',
    'kl_cov(coef=0)',
  )
  for name in wide:
    got = _gradient(whole_loss, inputs, trust_region=name)
    np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)


def test_dppo_keeps_a_rare_token_that_the_clip_would_drop(whole_loss, make_inputs):
  """From 0.001 to 0.002 the ratio doubles and almost no probability moves."""
  inputs = make_inputs(seed=10)
  rare = jnp.full_like(inputs.log_probs_t, np.log(1e-3))
  inputs = inputs._replace(
    log_probs_t=rare + np.log(2.0), proximal_log_probs_t=rare, adv_t=jnp.abs(inputs.adv_t)
  )
  found = {
    name: metrics.finished(whole_loss(resolve(trust_region=name, corrections=()), inputs))
    for name in ('ppo_clip', 'dppo_tv', 'dppo_kl')
  }
  assert float(found['ppo_clip']['clip_high_fraction']) == 1.0
  assert float(found['dppo_tv']['clip_high_fraction']) == 0.0
  assert float(found['dppo_kl']['clip_high_fraction']) == 0.0
  assert float(found['dppo_kl']['binary_kl']) > 0.0


def test_clip_cov_draws_other_tokens_at_the_next_update(whole_loss, make_inputs):
  inputs = make_inputs(seed=11, drift=0.0)
  name = 'clip_cov(fraction=0.2, absolute_low=-99, absolute_high=99)'
  objective = resolve(trust_region=name, corrections=())
  state, chosen = objective.init_state(), []
  assert float(covariance.init_updates()) == float(state['trust_region']) == 0.0
  assert float(covariance.count_update(state['trust_region'], {})) == 1.0
  for _ in range(3):
    gradient = jax.grad(
      lambda x, s=state: whole_loss(objective, inputs._replace(log_probs_t=x), s).loss
    )(inputs.log_probs_t)
    chosen.append((np.asarray(gradient) == 0) & np.asarray(inputs.mask_t))
    state = objective.update_state(state, {})
  count = int(0.2 * np.asarray(inputs.mask_t).sum())
  assert [int(c.sum()) for c in chosen] == [count] * 3
  assert (chosen[0] != chosen[1]).any() and (chosen[1] != chosen[2]).any()


def test_choices_are_of_the_batch(make_inputs):
  inputs = make_inputs(seed=12)
  chosen = covariance.choose_largest(inputs, fraction=0.1).tokens['chosen']
  assert int(chosen.sum()) == max(int(0.1 * int(inputs.mask_t.sum())), 1)
  ratio = resolve(trust_region='bapo').ratio(inputs)
  one = covariance.choose_inside(
    inputs, ratio=ratio, state=jnp.float32(0), absolute_low=-99.0, absolute_high=99.0
  )
  assert int(one.tokens['chosen'].sum()) == 1
  none = covariance.choose_inside(
    inputs, ratio=ratio, state=jnp.float32(0), absolute_low=98.0, absolute_high=99.0
  )
  assert int(none.tokens['chosen'].sum()) == 0
  good = inputs._replace(adv_t=jnp.abs(inputs.adv_t))
  bad = inputs._replace(adv_t=-jnp.abs(inputs.adv_t))
  found = balanced.search_bounds(good, ratio=ratio).scalars
  assert (float(found['low']), float(found['high'])) == pytest.approx((0.6, 1.2))
  found = balanced.search_bounds(bad, ratio=ratio).scalars
  assert (float(found['low']), float(found['high'])) == pytest.approx((0.9, 3.0))


def test_r2vpo(whole_loss, make_inputs):
  """The price of the variance rises while it is above the bound and falls, not below 0, after."""
  inputs = make_inputs(seed=3, drift=0.3)
  mask = np.asarray(inputs.mask_t)
  now, then, adv = (
    np.asarray(x, np.float64)[mask]
    for x in (inputs.log_probs_t, inputs.proximal_log_probs_t, inputs.adv_t)
  )
  rho = np.exp(now - then)
  variance = ((rho - 1) ** 2).mean()
  for delta, prices in ((0.5 * variance, (0.2, 0.2 + 2 * variance)), (9.0, (0.2, 0.0))):
    text = f'r2vpo(delta={delta}, step=4.0, start=0.2)'
    objective = resolve(trust_region=text, corrections=())
    state = objective.init_state()
    for price in prices:
      assert float(state['trust_region']) == pytest.approx(price, rel=1e-4)

      def loss(x, objective=objective, state=state):
        parts = whole_loss(objective, inputs._replace(log_probs_t=x), state)
        return parts.loss, metrics.finished(parts)

      (value, found), gradient = jax.value_and_grad(loss, has_aux=True)(inputs.log_probs_t)
      want = (-rho * adv + price * (rho - 1) ** 2).mean()
      assert float(value) == pytest.approx(want, rel=1e-5)
      slope = rho * (-adv + 2 * price * (rho - 1)) / len(rho)
      np.testing.assert_allclose(np.asarray(gradient)[mask], slope, rtol=2e-4, atol=1e-7)
      assert float(found['ratio_variance']) == pytest.approx(variance, rel=1e-4)
      state = objective.update_state(state, found)
  assert float(soft.first_price(start=0.5)) == 0.5
  raised = soft.raise_price(jnp.float32(1.0), {'ratio_variance': jnp.float32(0.12)})
  assert float(raised) == pytest.approx(1.1)
