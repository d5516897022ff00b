"""Weights and masks of every correction, against loops over sequences in numpy float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.objectives import loss, metrics, ratios
from rlax_stack.objectives.corrections import masks, whole_batch
from rlax_stack.objectives.inputs import clean
from rlax_stack.objectives.objective import resolve

_SEED, _DRIFT = 11, 0.4


class _Batch:
  """The trained tokens of a batch as float64 columns in reading order."""

  def __init__(self, inputs):
    mask = np.asarray(inputs.mask_t)
    for name, value in inputs._replace(vocabulary=mask)._asdict().items():
      setattr(self, name, np.asarray(value)[mask].astype(np.float64))
    self.w = np.exp(self.proximal_log_probs_t - self.behaviour_log_probs_t)
    self.u = np.exp(self.log_probs_t - self.behaviour_log_probs_t)
    self.rho = np.exp(self.log_probs_t - self.proximal_log_probs_t)

  def each(self, decide, *ids):
    """`decide(tokens of one run)` at each of its tokens."""
    keys = list(zip(*(ids or (self.trajectory_t,)), strict=True))
    out = np.zeros(len(keys))
    for key in set(keys):
      mine = np.array([k == key for k in keys])
      out[mine] = decide(mine)
    return out


def _geometric(b):
  return b.each(lambda i: 0.85 <= np.prod(b.w[i]) ** (1 / i.sum()) <= 1.1)


def _product(b):
  return b.each(lambda i: 0.5 <= np.prod(b.w[i]) <= 1.5, b.trajectory_t, b.turn_t)


def _outlier(b):
  return b.each(lambda i: all(0.6 <= w <= 2.0 for w in b.w[i]))


def _opsm(b):
  return b.each(lambda i: not (b.adv_t[i].mean() < 0 and -np.log(b.u[i]).mean() > 0.05))


def _tv(b):
  far = b.each(lambda i: np.abs(b.w[i] - 1).mean() > 0.3) == 1
  return 1.0 - (far & (np.log(b.w) * b.adv_t > 0))


def _m2po(b, counted, budget):
  """Takes the largest away, one after another, until the mean of the others is small enough."""
  moments = np.log(b.u) ** 2
  left = [i for i in np.argsort(moments) if counted[i]]
  while left and np.mean(moments[left]) > budget:
    left.pop()
  return np.array([1.0 if i in left or not counted[i] else 0.0 for i in range(len(moments))])


def _normalised_tokens(b):
  weight = np.minimum(b.w, 1.3)
  return weight / weight.mean()


def _normalised_sequences(b):
  weight = b.each(lambda i: min(np.prod(b.w[i]), 1.3))
  first = [list(b.trajectory_t).index(t) for t in set(b.trajectory_t)]
  return weight / weight[first].mean()


_CASES = {
  'geometric_mask(absolute_low=0.85, absolute_high=1.1)': _geometric,
  'product_mask(absolute_low=0.5, absolute_high=1.5, over="turn")': _product,
  'outlier_mask(absolute_low=0.6, absolute_high=2)': _outlier,
  'opsm(delta_log_high=0.05)': _opsm,
  'tv_mask(delta=0.3)': _tv,
  'second_moment_mask(absolute_high=0.1)': lambda b: _m2po(b, b.adv_t * np.log(b.u) > 0, 0.1),
  'second_moment_mask(absolute_high=0.1, tokens="all")': lambda b: _m2po(b, b.u > 0, 0.1),
  'self_normalised_tis(absolute_high=1.3)': _normalised_tokens,
  'self_normalised_tis(absolute_high=1.3, level="sequence")': _normalised_sequences,
  'ess_step': lambda b: np.ones(len(b.w)),
}
_MASKS = [text for text in _CASES if 'mask' in text or 'opsm' in text]


@pytest.mark.parametrize('text', sorted(_CASES))
def test_value_gradient_and_metrics(text, whole_loss, make_inputs):
  inputs = make_inputs(seed=_SEED, drift=_DRIFT)
  held, mask = clean(inputs), np.asarray(inputs.mask_t)
  batch = _Batch(held)
  weight = _CASES[text](batch)
  objective = resolve(trust_region='none', corrections=(text,))

  def run(log_probs):
    parts = whole_loss(objective, inputs._replace(log_probs_t=log_probs))
    return parts.loss, parts

  (value, parts), gradient = jax.value_and_grad(run, has_aux=True)(inputs.log_probs_t)
  want = -weight * batch.adv_t * batch.rho / len(weight)
  assert float(value) == pytest.approx(want.sum(), rel=1e-5)
  np.testing.assert_allclose(np.asarray(gradient)[mask], want, rtol=2e-5, atol=1e-8)
  found = {name: float(v) for name, v in metrics.finished(parts).items()}
  assert found['correction_mean'] == pytest.approx(weight.mean(), rel=1e-5)
  if text in _MASKS:
    assert 0 < weight.mean() < 1, 'the bound does not bite'
    assert found['kept_fraction'] == pytest.approx(weight.mean(), rel=1e-5)
  else:
    assert found['kept_fraction'] == 1.0
  # What is measured of the policies does not depend on the correction.
  assert found['ess_fraction'] == pytest.approx(batch.w.mean() ** 2 / (batch.w**2).mean(), rel=1e-5)
  assert found['kl_behaviour'] == pytest.approx((batch.u - 1 - np.log(batch.u)).mean(), rel=1e-4)
  reverse = (batch.u * np.log(batch.u) - batch.u + 1).mean()
  assert found['kl_behaviour_reverse'] == pytest.approx(reverse, rel=1e-4)


@pytest.mark.parametrize('text', sorted(_CASES))
def test_on_policy_a_correction_changes_nothing(text, whole_loss, make_inputs):
  inputs = make_inputs(seed=2, drift=0.0)
  plain = resolve(trust_region='none', corrections=())
  corrected = resolve(trust_region='none', corrections=(text,))
  got = whole_loss(corrected, inputs)
  np.testing.assert_allclose(got.loss, whole_loss(plain, inputs).loss, rtol=1e-6)
  assert float(metrics.finished(got)['kept_fraction']) == 1.0


def test_masks_multiply_with_weights(whole_loss, make_inputs):
  inputs = make_inputs(seed=_SEED, drift=_DRIFT)
  texts = ('token_tis(absolute_high=1.2)', 'geometric_mask(absolute_low=0.85, absolute_high=1.1)')
  batch = _Batch(clean(inputs))
  weight = np.minimum(batch.w, 1.2) * _geometric(batch)
  got = whole_loss(resolve(trust_region='none', corrections=texts), inputs).loss
  want = -(weight * batch.adv_t * batch.rho).mean()
  assert float(got) == pytest.approx(want, rel=1e-5)


def test_second_moment_mask_drops_ties_together_and_may_drop_all(make_inputs):
  inputs = clean(make_inputs(seed=3))
  drift = jnp.where(inputs.mask_t, 0.5, 0.0)
  inputs = inputs._replace(
    log_probs_t=inputs.behaviour_log_probs_t + drift, adv_t=jnp.where(inputs.mask_t, 1.0, 0.0)
  )
  for budget, kept in ((0.3, True), (0.2, False)):
    statistics = masks.second_moment_statistics(inputs, absolute_high=budget)
    assert (np.asarray(statistics.tokens['kept']) == (kept | ~np.asarray(inputs.mask_t))).all()


def test_self_normalised_weights_have_mean_one(whole_loss, make_inputs):
  inputs = make_inputs(seed=_SEED, drift=_DRIFT)
  got = whole_loss(resolve(corrections=('self_normalised_tis',)), inputs)
  assert float(metrics.finished(got)['correction_mean']) == pytest.approx(1.0, rel=1e-6)
  held = clean(inputs)
  mean = float(whole_batch.weight_mean(held, absolute_high=1.3).scalars['mean'])
  assert mean == pytest.approx(np.minimum(_Batch(held).w, 1.3).mean(), rel=1e-6)


@pytest.mark.parametrize(('fraction', 'rule'), [(1.0, 'sqrt'), (0.9, 'linear'), (0.01, 'sqrt')])
def test_ess_step(fraction, rule, make_inputs):
  inputs = make_inputs(seed=_SEED, drift=_DRIFT)
  text = f'ess_step(on_policy_fraction={fraction}, rule={rule!r})'
  prepared = loss.prepare(resolve(corrections=(text,)), inputs, {})
  batch = _Batch(clean(inputs))
  weights = np.array([np.prod(batch.w[batch.trajectory_t == t]) for t in set(batch.trajectory_t)])
  ess = weights.sum() ** 2 / (weights**2).sum() / len(weights)
  want = min(ess / fraction, 1.0)
  assert float(prepared.step_scale) == pytest.approx(
    want**0.5 if rule == 'sqrt' else want, rel=1e-5
  )
  assert loss.prepare(resolve(), inputs, {}).step_scale is None


def test_scales_of_several_boxes_multiply_and_huge_weights_do_not_overflow(make_inputs):
  inputs = make_inputs(seed=_SEED, drift=30.0)
  bound = resolve(corrections=('ess_step',)).corrections[0]
  once = dataclasses.replace(resolve(), corrections=(bound,))
  twice = dataclasses.replace(resolve(), corrections=(bound, bound))
  scales = [float(loss.prepare(o, inputs, {}).step_scale) for o in (once, twice)]
  assert 0.3 < scales[0] < 0.6 and scales[1] == pytest.approx(scales[0] ** 2, rel=1e-5)
  assert float(whole_batch.ess_scale(clean(inputs)).step_scale) == scales[0]


def test_log_linear_proximal_policy(whole_loss, make_inputs):
  """At staleness d the ratio is the d-th root of π/π_behaviour, the weight what is left of it."""
  inputs = make_inputs(seed=_SEED, drift=0.1)
  held = clean(inputs)
  staleness = jnp.where(held.mask_t, held.trajectory_t % 4, -1)
  inputs = inputs._replace(staleness_t=staleness)
  objective = resolve(
    ratio='token(base="log_linear")',
    trust_region='none',
    corrections=('token_tis(absolute_high=1.05)',),
  )
  batch = _Batch(clean(inputs))
  root = 1 / np.maximum(batch.staleness_t, 1)
  rho, weight = batch.u**root, np.minimum(batch.u ** (1 - root), 1.05)
  assert (weight == 1.05).any() and (rho != batch.u).any()

  def run(log_probs):
    parts = whole_loss(objective, inputs._replace(log_probs_t=log_probs))
    return parts.loss, parts

  (value, parts), gradient = jax.value_and_grad(run, has_aux=True)(inputs.log_probs_t)
  want = -weight * rho * batch.adv_t / len(rho)
  assert float(value) == pytest.approx(want.sum(), rel=1e-5)
  got = np.asarray(gradient)[np.asarray(inputs.mask_t)]
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-8)
  assert float(metrics.finished(parts)['ratio_mean']) == pytest.approx(rho.mean(), rel=1e-5)
  np.testing.assert_array_equal(ratios.interpolated(held), held.proximal_log_probs_t)


def test_parts_of_a_partial_rollout_are_corrected_by_their_own_version(whole_loss, make_inputs):
  """A sequence begun by one version and ended by another: each token against what drew it."""
  inputs = clean(make_inputs(seed=_SEED, drift=0.0))
  ended = inputs.mask_t & (inputs.turn_t == 1)
  inputs = inputs._replace(
    version_t=jnp.where(ended, 3, 1),
    # The old version gave half the probability that the current one gives, the new one the same.
    behaviour_log_probs_t=inputs.log_probs_t - jnp.where(ended, 0.0, jnp.log(2.0)),
  )
  objective = resolve(ratio='token(base="behaviour")', trust_region='none', corrections=())
  gradient = jax.grad(lambda x: whole_loss(objective, inputs._replace(log_probs_t=x)).loss)(
    inputs.log_probs_t
  )
  count = np.asarray(inputs.mask_t).sum()
  want = -np.asarray(inputs.adv_t) * np.where(np.asarray(ended), 1.0, 2.0) / count
  np.testing.assert_allclose(np.where(inputs.mask_t, gradient, 0.0), want, rtol=1e-5, atol=1e-8)


def test_a_mask_of_tokens_is_refused_with_a_ratio_of_sequences():
  for text in ('tv_mask', 'second_moment_mask'):
    with pytest.raises(ConfigError, match=f'{text} drops single tokens'):
      resolve(ratio='sequence', corrections=(text,))
  # A mask weighs nothing, so it may stand beside a ratio against behaviour.
  assert resolve(ratio='token(base="behaviour")', corrections=('second_moment_mask',))


def test_formula_names_the_ratios_that_are_read():
  line = resolve(corrections=('geometric_mask', 'opsm')).formula
  assert 'w = π_proximal/π_behaviour' in line and 'u = π/π_behaviour' in line
  assert 'π_behaviour' not in resolve(corrections=('ess_step',)).formula
