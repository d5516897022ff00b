"""Boxes that read whole distributions against numpy float64: values, gradients, what is held."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives import metrics
from rlax_stack.objectives.inputs import clean
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.regularisers import controlled_entropy, low_probability
from rlax_stack.objectives.vocabulary import current_terms, merged, proximal_terms

WORDS = 7


def _logits(seed, count, scale=1.5):
  return scale * np.random.default_rng(seed).standard_normal((count, WORDS))


def _log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _nucleus(row, top_p):
  """Entropy of the renormalised nucleus of one distribution, word by word."""
  order, kept, mass = np.argsort(-row, kind='stable'), [], 0.0
  for word in order:
    mass += row[word]
    if mass < top_p or not kept:
      kept.append(word)
    if mass >= top_p:
      break
  inside = row[kept] / row[kept].sum()
  return -(inside * np.log(inside)).sum()


@pytest.mark.parametrize('top_p', [0.3, 0.8, 0.97])
def test_nucleus_entropy(top_p):
  log_policy = _log_softmax(_logits(0, 20))
  want = [_nucleus(np.exp(row), top_p) for row in log_policy]
  target = jnp.zeros(20, jnp.int32)

  def total(logits):
    policy = jax.nn.log_softmax(logits)
    return controlled_entropy.nucleus_entropy(policy, target, top_p=top_p)['entropy']

  logits = jnp.asarray(_logits(0, 20), jnp.float32)
  np.testing.assert_allclose(total(logits), want, atol=2e-6)
  gradient = jax.grad(lambda x: jnp.sum(total(x)))(logits)
  step = np.random.default_rng(1).standard_normal((20, WORDS)) * 1e-6
  moved = [
    sum(_nucleus(np.exp(row), top_p) for row in _log_softmax(_logits(0, 20) + sign * step))
    for sign in (1, -1)
  ]
  assert (np.asarray(gradient) * step).sum() == pytest.approx((moved[0] - moved[1]) / 2, rel=1e-3)
  whole = controlled_entropy.nucleus_entropy(jnp.asarray(log_policy), target, top_p=1.0)
  assert whole == {}


def _loss(whole_loss, objective, inputs, logits, proximal_logits, target):
  """The loss and its metrics as a function of the logits of every place of the batch."""
  shape = inputs.mask_t.shape

  def spread(found):
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)

  def run(logits):
    log_policy = jax.nn.log_softmax(logits)
    held, terms = {}, proximal_terms(objective)
    if terms is not None:
      held = terms(jax.nn.log_softmax(proximal_logits), target, {})
    terms = current_terms(objective, score_proximal=True)
    found = {} if terms is None else terms(log_policy, target, held)
    chosen = jnp.take_along_axis(log_policy, target[:, None], axis=-1)[:, 0].reshape(shape)
    now = inputs._replace(log_probs_t=chosen, vocabulary=spread(merged(held, found)))
    parts = whole_loss(objective, now)
    return parts.loss, metrics.finished(parts)

  return run


@pytest.fixture(scope='module')
def batch(make_inputs):
  """Inputs whose proximal log-probs are those of the proximal logits, and both logits."""
  inputs = make_inputs(seed=31)
  count, rng = inputs.mask_t.size, np.random.default_rng(7)
  target = rng.integers(0, WORDS, count)
  old = _logits(2, count)
  new = old + 0.4 * rng.standard_normal(old.shape)
  chosen = np.take_along_axis(_log_softmax(old), target[:, None], -1)[:, 0]
  inputs = inputs._replace(
    proximal_log_probs_t=jnp.asarray(chosen.reshape(inputs.mask_t.shape), jnp.float32)
  )
  return inputs, new, old, target


def _run(whole_loss, text, batch, slot='regularisers', **boxes):
  inputs, new, old, target = batch
  value = (text,) if slot == 'regularisers' else text
  objective = resolve(corrections=(), **{slot: value}, **boxes)
  run = _loss(
    whole_loss,
    objective,
    inputs,
    new,
    jnp.asarray(old, jnp.float32),
    jnp.asarray(target, jnp.int32),
  )
  (loss, found), gradient = jax.value_and_grad(run, has_aux=True)(jnp.asarray(new, jnp.float32))
  return float(loss), np.asarray(gradient, np.float64), found


def test_peak_entropy_of_the_nucleus(whole_loss, batch):
  """At the first update the anchor is set; from then on the pull is on the nucleus entropy."""
  inputs, new, old, target = batch
  inputs = inputs._replace(adv_t=jnp.zeros_like(inputs.adv_t))
  mask = np.asarray(inputs.mask_t).reshape(-1)
  ids = np.asarray(clean(inputs).trajectory_t).reshape(-1)
  objective = resolve(corrections=(), regularisers=('peak_entropy(coef=0.5, top_p=0.8)',))
  anchor = 0.3
  state = {'regularisers/0': {'anchor': jnp.float32(anchor), 'set': jnp.float32(1.0)}}

  def run(logits):
    terms = current_terms(objective, score_proximal=True)
    found = terms(jax.nn.log_softmax(logits), jnp.asarray(target, jnp.int32), {})
    found = jax.tree.map(lambda x: x.reshape(inputs.mask_t.shape), found)
    parts = whole_loss(objective, inputs._replace(vocabulary=found), state)
    return parts.loss, metrics.finished(parts)

  (loss, found), gradient = jax.value_and_grad(run, has_aux=True)(jnp.asarray(new, jnp.float32))

  def mean(logits, weight=None):
    entropy = np.array([_nucleus(np.exp(row), 0.8) for row in _log_softmax(logits)])
    if weight is None:
      weight = np.zeros(len(entropy))
      for t in set(ids[mask]):
        mine = np.flatnonzero(mask & (ids == t))
        above = mine[entropy[mine] > np.quantile(entropy[mine], 0.8)]
        weight[above] = 1 / max(len(above), 1)
      weight /= sum(weight[mask & (ids == t)].sum() > 0 for t in set(ids[mask]))
    return (weight * entropy).sum(), weight

  want, weight = mean(new)
  assert float(found['peak_entropy']) == pytest.approx(want, rel=1e-5)
  assert float(loss) == pytest.approx(0.5 * (want - anchor) ** 2, rel=1e-4)
  step = np.random.default_rng(3).standard_normal(new.shape) * 1e-6
  moved = [0.5 * (mean(new + sign * step, weight)[0] - anchor) ** 2 for sign in (1, -1)]
  assert (gradient * step).sum() == pytest.approx((moved[0] - moved[1]) / 2, rel=1e-3)


@pytest.mark.parametrize(('min_p', 'relative'), [(0.1, True), (0.05, False), (0.0, True)])
def test_proxy_drops_the_noise_and_renormalises(min_p, relative):
  log_policy, target = _log_softmax(_logits(4, 30)), np.arange(30) % WORDS
  found = low_probability.filtered_proxy(
    jnp.asarray(log_policy, jnp.float32),
    jnp.asarray(target, jnp.int32),
    min_p=min_p,
    relative=relative,
  )
  dropped = 0
  for row, word, log_proxy, kept in zip(
    np.exp(log_policy), target, found['log_proxy'], found['kept'], strict=True
  ):
    inside = row >= min_p * (row.max() if relative else 1.0)
    assert bool(kept) == inside[word]
    dropped += not inside[word]
    want = np.log(row[word] / row[inside].sum()) if inside[word] else 0.0
    assert float(log_proxy) == pytest.approx(want, abs=2e-6)
  assert (dropped > 0) == (min_p > 0)


@pytest.mark.parametrize('fraction', [0.02, 0.5])
def test_lp_reg(fraction, whole_loss, batch):
  inputs, new, old, target = batch
  text = f'lp_reg(coef=0.7, fraction={fraction}, min_p=0.15)'
  plain = _run(whole_loss, 'kl_behaviour(coef=0.0)', batch)
  loss, gradient, found = _run(whole_loss, text, batch)
  held = clean(inputs)
  mask = np.asarray(held.mask_t).reshape(-1)
  adv = np.asarray(held.adv_t, np.float64).reshape(-1)
  now, then = _log_softmax(new), np.exp(_log_softmax(old))
  places = np.arange(len(target))
  chosen = now[places, target]
  negative = np.flatnonzero(mask & (adv < 0))
  count = max(int(fraction * len(negative)), 1)
  least = negative[np.argsort(chosen[negative])[:count]]
  want, want_gradient, pulled = 0.0, np.zeros_like(new), 0
  for t in least:
    inside = then[t] >= 0.15 * then[t].max()
    gap = np.log(then[t][target[t]] / then[t][inside].sum()) - chosen[t]
    if inside[target[t]] and gap > 0:
      pulled += 1
      want += 0.7 * (np.exp(gap) - gap - 1) / mask.sum()
      score = np.eye(WORDS)[target[t]] - np.exp(now[t])
      want_gradient[t] += 0.7 * (1 - np.exp(gap)) * score / mask.sum()
  assert pulled > 0 or fraction < 0.1
  assert loss - plain[0] == pytest.approx(want, abs=2e-6)
  np.testing.assert_allclose(gradient - plain[1], want_gradient, atol=3e-6)
  assert float(found['lp_reg_pulled']) == pytest.approx(pulled / mask.sum(), abs=1e-6)


def test_proxy_of_the_proximal_policy_is_held_and_agrees_when_it_is_the_current_one():
  objective = resolve(corrections=(), regularisers=('lp_reg(min_p=0.15)',))
  logits, target = jnp.asarray(_logits(5, 12), jnp.float32), jnp.arange(12, dtype=jnp.int32) % WORDS
  policy = jax.nn.log_softmax(logits)
  want = proximal_terms(objective)(policy, target, {})
  assert current_terms(objective, score_proximal=True) is None

  def inline(logits):
    return current_terms(objective, score_proximal=False)(jax.nn.log_softmax(logits), target, {})

  jax.tree.map(np.testing.assert_array_equal, inline(logits), want)
  total = jax.grad(lambda x: jnp.sum(inline(x)['regularisers/0']['log_proxy']))(logits)
  assert not np.asarray(total).any()
  assert objective.needs_scores and not resolve().needs_scores


def test_least_likely_are_those_of_the_failures_of_the_whole_batch(make_inputs):
  inputs = clean(make_inputs(seed=33))
  found = np.asarray(low_probability.least_likely(inputs, fraction=0.3).tokens['chosen'])
  negative = np.asarray(inputs.mask_t) & (np.asarray(inputs.adv_t) < 0)
  ordered = np.sort(np.asarray(inputs.log_probs_t)[negative])
  assert not found[~negative].any() and found.sum() == int(0.3 * negative.sum())
  assert np.asarray(inputs.log_probs_t)[found].max() == ordered[found.sum() - 1]
  nothing = inputs._replace(adv_t=jnp.abs(inputs.adv_t))
  assert not np.asarray(low_probability.least_likely(nothing).tokens['chosen']).any()
