"""KL and entropy terms against numpy float64: values, gradients, denominators, carried state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives import metrics
from rlax_stack.objectives.inputs import clean
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.regularisers import controlled_entropy, distribution, kl, positive

_ESTIMATORS = ('k1', 'k2', 'k3', 'k3_plus', 'k3_score', 'k3_is')


def _term(whole_loss, inputs, text, state=None, which='log_probs_t'):
  """Value and gradient of one regulariser alone, and the metrics: no token has an advantage."""
  inputs = inputs._replace(adv_t=jnp.zeros_like(inputs.adv_t))
  objective = resolve(corrections=(), aggregation='sequence_sum', regularisers=(text,))
  state = objective.init_state() if state is None else {'regularisers/0': state}

  def run(x):
    parts = whole_loss(objective, inputs._replace(**{which: x}), state)
    return parts.loss, parts

  (value, parts), gradient = jax.value_and_grad(run, has_aux=True)(getattr(inputs, which))
  found = metrics.finished(parts)
  return float(value), np.asarray(gradient), found, objective.update_state(state, found)


def _columns(inputs):
  mask = np.asarray(inputs.mask_t)
  held = clean(inputs)._replace(vocabulary=mask)
  return mask, {k: np.asarray(v, np.float64)[mask] for k, v in held._asdict().items()}


def _estimates(d, u):
  """Value and derivative by log π of every estimator, written out."""
  k3 = np.exp(-d) - 1 + d
  return {
    'k1': (d, np.ones_like(d)),
    'k2': (d**2 / 2, d),
    'k3': (k3, 1 - np.exp(-d)),
    'k3_plus': (k3, d),
    'k3_score': (k3, d),
    'k3_is': (u * k3, u * d),
  }


@pytest.mark.parametrize('box', ['kl_anchor', 'kl_behaviour', 'kl_teacher'])
@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_kl(box, estimator, whole_loss, make_inputs):
  inputs = make_inputs(seed=21, drift=0.3)
  mask, b = _columns(inputs)
  u = np.exp(b['log_probs_t'] - b['behaviour_log_probs_t'])
  d = b['log_probs_t'] - b[f'{box[3:]}_log_probs_t']
  text = f'{box}(coef=0.5, estimator={estimator!r})'
  value, gradient, found, _ = _term(whole_loss, inputs, text)
  want, slope = _estimates(d, u)[estimator]
  # The denominator is the trained tokens, though the policy loss is divided by sequences.
  assert value == pytest.approx(0.5 * want.mean(), rel=1e-5)
  np.testing.assert_allclose(gradient[mask], 0.5 * slope / len(d), rtol=2e-5, atol=1e-8)
  if box != 'kl_behaviour':
    assert float(found[box]) == pytest.approx(want.mean(), rel=1e-5)
  assert set(kl.TABLE) == {'kl_anchor', 'kl_behaviour', 'kl_teacher'}


def test_weighted_kl_has_the_expected_gradient_of_the_kl_off_policy():
  """Over all tokens of a small vocabulary, weighted by behaviour: exactly that of the sum."""
  rng = np.random.default_rng(0)
  logits = {name: rng.standard_normal(5) for name in ('now', 'behaviour', 'anchor')}

  def log_softmax(x):
    return x - np.log(np.exp(x).sum())

  behaviour, anchor = log_softmax(logits['behaviour']), log_softmax(logits['anchor'])

  def exact(x):
    policy = log_softmax(x)
    return (np.exp(policy) * (policy - anchor)).sum()

  now = log_softmax(logits['now'])
  u, d = np.exp(now - behaviour), now - anchor
  slope = _estimates(d, u)['k3_is'][1]
  got, want = np.zeros(5), np.zeros(5)
  for j in range(5):
    step = np.eye(5)[j] * 1e-6
    want[j] = (exact(logits['now'] + step) - exact(logits['now'] - step)) / 2e-6
    score = np.eye(5)[:, j] - np.exp(now)[j]  # ∂ log π(v) / ∂ logit j
    got[j] = (np.exp(behaviour) * slope * score).sum()
  np.testing.assert_allclose(got, want, atol=1e-8)


def test_behaviour_term_is_the_squared_log_ratio_of_prime_rl(whole_loss, make_inputs):
  inputs = make_inputs(seed=22)
  _, b = _columns(inputs)
  value, *_ = _term(whole_loss, inputs, 'kl_behaviour')
  d = b['log_probs_t'] - b['behaviour_log_probs_t']
  assert value == pytest.approx(0.001 * (d**2).mean(), rel=1e-5)


def test_adaptive_entropy(whole_loss, make_inputs):
  inputs = make_inputs(seed=23)
  mask, b = _columns(inputs)
  mean, value_of = b['entropy_t'].mean(), {}
  text = 'adaptive_entropy(target={}, step=0.1, start=0.05, absolute_high=0.2)'
  for target, coefs in ((2.0, (0.05, 0.15, 0.2, 0.2)), (0.01, (0.05, 0.0, 0.0, 0.0))):
    state = None
    for update, coef in enumerate(coefs):
      # Above the target it falls and, from the second update on, is not in use.
      used = coef if target > mean or update == 0 else 0.0
      value, gradient, _, states = _term(
        whole_loss, inputs, text.format(target), state, which='entropy_t'
      )
      state = states['regularisers/0']
      assert value == pytest.approx(-used * mean, rel=1e-5, abs=1e-9)
      np.testing.assert_allclose(gradient[mask], -used / mask.sum(), rtol=1e-5)
      value_of[target] = float(state['coef'])
  assert value_of == {2.0: pytest.approx(0.2), 0.01: 0.0}
  fresh = controlled_entropy.start_coefficient(start=0.3)
  steered = controlled_entropy.steer_coefficient(fresh, {'entropy': jnp.float32(9.0)})
  assert {k: float(v) for k, v in steered.items()} == {'coef': pytest.approx(0.005), 'on': 0.0}


def _peaks(mask, b, quantile):
  """Weights of the peaks and their mean, from sorted copies of each sequence."""
  weight = np.zeros(mask.sum())
  ids = b['trajectory_t']
  for t in set(ids):
    mine = np.flatnonzero(ids == t)
    above = mine[b['entropy_t'][mine] > np.quantile(b['entropy_t'][mine], quantile)]
    weight[above] = 1 / max(len(above), 1)
  weight /= sum(weight[ids == t].sum() > 0 for t in set(ids))
  return weight, (weight * b['entropy_t']).sum()


@pytest.mark.parametrize('quantile', [0.5, 0.8])
def test_peak_entropy(quantile, whole_loss, make_inputs):
  inputs = make_inputs(seed=24)
  mask, b = _columns(inputs)
  weight, mean = _peaks(mask, b, quantile)
  text = f'peak_entropy(coef=0.5, quantile={quantile})'
  value, gradient, found, states = _term(whole_loss, inputs, text, which='entropy_t')
  # The first update sets the anchor and pulls nowhere.
  assert value == 0.0 and not gradient.any()
  assert float(found['peak_entropy']) == pytest.approx(mean, rel=1e-5)
  state = states['regularisers/0']
  assert float(state['anchor']) == pytest.approx(mean, rel=1e-5)
  lower = inputs._replace(entropy_t=inputs.entropy_t * 0.5)
  value, gradient, _, states = _term(whole_loss, lower, text, state, which='entropy_t')
  assert value == pytest.approx(0.5 * (0.5 * mean) ** 2, rel=1e-5)
  np.testing.assert_allclose(gradient[mask], 0.5 * 2 * -0.5 * mean * weight, rtol=1e-5)
  assert float(states['regularisers/0']['anchor']) == pytest.approx(mean, rel=1e-5)


def test_kept_anchor_and_peaks_stand_on_their_own(make_inputs):
  inputs = clean(make_inputs(seed=25))
  mask, b = _columns(inputs)
  state = controlled_entropy.no_anchor()
  kept = controlled_entropy.keep_anchor(state, {'peak_entropy': jnp.float32(2.0)})
  again = controlled_entropy.keep_anchor(kept, {'peak_entropy': jnp.float32(5.0)})
  assert float(again['anchor']) == 2.0
  found = controlled_entropy.peaks(inputs, state=kept, vocabulary={}, quantile=0.5)
  weight, mean = _peaks(mask, b, 0.5)
  np.testing.assert_allclose(np.asarray(found.tokens['weight_t'])[mask], weight, rtol=1e-6)
  assert float(found.scalars['distance']) == pytest.approx(mean - 2.0, rel=1e-5)


def test_kl_reward(make_reward_batch):
  batch = dataclasses.replace(
    make_reward_batch([1.0, 0.0], [0, 0], [2, 1]),
    log_probs_t=(np.array([-0.5, -1.0], np.float32), np.array([-0.25], np.float32)),
    anchor_log_probs_t=(np.array([-1.5, -0.5], np.float32), np.array([-0.5], np.float32)),
  )
  objective = resolve(shaping=('kl_reward(coef=0.5)',))
  assert objective.tags >= {'host_scores'}
  np.testing.assert_allclose(objective.shaping[0](batch).reward, [1 - 0.25, -0.125])


def _distances(b, temperature, log_probs):
  """The loss of DMPO, group by group."""
  total, groups = 0.0, set(b['group_t'])
  for g in groups:
    answers = sorted({int(t) for t in b['trajectory_t'][b['group_t'] == g]})
    reward, score = (
      np.array([value[b['trajectory_t'] == t].mean() for t in answers])
      for value in (b['reward_t'], log_probs)
    )
    target, policy = (
      np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (reward / temperature, score)
    )
    total += ((target - policy) ** 2).mean()
  return total / len(groups)


@pytest.mark.parametrize('temperature', [1 / 15, 0.5])
def test_distribution_matching(temperature, whole_loss, make_inputs):
  inputs = make_inputs(seed=26)
  mask, b = _columns(inputs)
  text = f'distribution_matching(coef=3.0, temperature={temperature})'
  value, gradient, *_ = _term(whole_loss, inputs, text)
  assert value == pytest.approx(3.0 * _distances(b, temperature, b['log_probs_t']), rel=1e-5)
  for seed in range(3):
    step = 1e-5 * np.random.default_rng(seed).standard_normal(mask.sum())
    ends = [_distances(b, temperature, b['log_probs_t'] + sign * step) for sign in (1, -1)]
    assert (gradient[mask] * step).sum() == pytest.approx(1.5 * (ends[0] - ends[1]), rel=1e-3)
  found = distribution.group_distances(clean(inputs), temperature=temperature)
  assert float(jnp.sum(found.tokens['loss'])) == pytest.approx(value / 3.0, rel=1e-5)


@pytest.mark.parametrize('masked', [0.0, float('nan')])
def test_positive_nll_is_the_mean_over_tokens_of_right_answers(masked, whole_loss, make_inputs):
  inputs = make_inputs(seed=3, masked=masked)
  plain = resolve(corrections=())
  objective = resolve(corrections=(), regularisers=('positive_nll(coef=0.3, correct_at=0.4)',))
  assert not objective.needs_scores

  def total(log_probs, objective=objective):
    return whole_loss(objective, inputs._replace(log_probs_t=log_probs)).loss

  mask = np.asarray(inputs.mask_t)
  right = mask & (np.asarray(inputs.reward_t) >= 0.4)
  assert 0 < right.sum() < mask.sum()
  counted = positive.positive_tokens(clean(inputs), correct_at=0.4)
  assert float(counted.scalars['tokens']) == right.sum()
  log_probs = np.asarray(inputs.log_probs_t, np.float64)
  want = -0.3 * log_probs[right].sum() / right.sum()
  got = total(inputs.log_probs_t) - total(inputs.log_probs_t, plain)
  assert got == pytest.approx(want, rel=1e-4)
  gradients = [jax.grad(total)(inputs.log_probs_t, o) for o in (objective, plain)]
  difference = np.asarray(gradients[0] - gradients[1])
  np.testing.assert_allclose(difference[right], -0.3 / right.sum(), rtol=1e-3)
  np.testing.assert_array_equal(difference[~right], 0.0)
  found = whole_loss(objective, inputs).means['positive']
  assert found.numerator / found.denominator == pytest.approx(right.sum() / mask.sum())


def test_positive_nll_of_wrong_answers_alone_is_nothing(whole_loss, make_inputs):
  inputs = make_inputs()
  plain, objective = resolve(), resolve(regularisers=('positive_nll(correct_at=2.0)',))
  assert whole_loss(objective, inputs).loss == whole_loss(plain, inputs).loss
