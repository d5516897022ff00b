"""TROLL's projection against a float64 solver of its dual: values, implicit gradient, the ball."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.objectives import metrics
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.trust_regions import projection
from rlax_stack.objectives.vocabulary import current_terms, merged, proximal_terms

WORDS, DELTA = 9, 0.05


def _log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _kl(p, q):
  return (np.exp(p) * (p - q)).sum()


def _project(new, old, delta=DELTA):
  """log π̃ by doubling and bisecting η, in float64."""

  def at(eta):
    return _log_softmax((new + eta * old) / (1 + eta))

  if _kl(new, old) <= delta:
    return new
  low, high = 0.0, 1.0
  while _kl(at(high), old) > delta:
    low, high = high, 2 * high
  for _ in range(200):
    middle = 0.5 * (low + high)
    low, high = (middle, high) if _kl(at(middle), old) > delta else (low, middle)
  return at(high)


def _support(old, target, size, tail):
  """Words kept, in order; the last entry of a cut distribution is all others together."""
  order, kept, mass = np.argsort(-old), [], 0.0
  for word in order[:size]:
    if mass >= 1.0 - tail:
      break
    kept.append(int(word))
    mass += np.exp(old[word])
  return kept if target in kept else [*kept, int(target)]


def _cut(row, kept):
  rest = max(np.exp(row).sum() - np.exp(row[kept]).sum(), 0.0)
  return np.append(row[kept], np.log(rest + 1e-20))


def _logits(seed, count, drift=1.0):
  rng = np.random.default_rng(seed)
  old = 1.5 * rng.standard_normal((count, WORDS))
  return old + drift * rng.standard_normal(old.shape), old, rng.integers(0, WORDS, count)


def test_projection_solves_the_dual_and_stays_in_the_ball():
  new, old, _ = _logits(0, 60)
  new, old = _log_softmax(new), _log_softmax(old)
  found = projection.project(
    jnp.asarray(new, jnp.float32), jnp.asarray(old, jnp.float32), jnp.ones(new.shape, bool), DELTA
  )
  want = np.stack([_project(n, o) for n, o in zip(new, old, strict=True)])
  np.testing.assert_allclose(found.log_probs, want, atol=2e-5)
  outside = np.array([_kl(n, o) > DELTA for n, o in zip(new, old, strict=True)])
  np.testing.assert_array_equal(found.outside, outside)
  assert 0.3 < outside.mean() < 1.0
  after = [_kl(p, o) for p, o in zip(np.asarray(found.log_probs, np.float64), old, strict=True)]
  np.testing.assert_allclose(np.array(after)[outside], DELTA, rtol=1e-4)
  same = projection.project(*(jnp.asarray(old, jnp.float32),) * 2, jnp.ones(old.shape, bool), DELTA)
  np.testing.assert_array_equal(same.log_probs, jnp.asarray(old, jnp.float32))
  assert not np.asarray(same.outside).any()


def test_gradient_goes_through_the_step_too():
  new, old, _ = _logits(1, 25)
  weight = np.random.default_rng(2).standard_normal(new.shape)

  def total(logits):
    policy = jax.nn.log_softmax(logits)
    held = jnp.asarray(_log_softmax(old), jnp.float32)
    found = projection.project(policy, held, jnp.ones(held.shape, bool), DELTA)
    return jnp.sum(jnp.asarray(weight, jnp.float32) * found.log_probs)

  gradient = np.asarray(jax.grad(total)(jnp.asarray(new, jnp.float32)), np.float64)

  def exact(logits):
    pairs = zip(_log_softmax(logits), _log_softmax(old), strict=True)
    return (weight * np.stack([_project(n, o) for n, o in pairs])).sum()

  for seed in range(3):
    step = 1e-5 * np.random.default_rng(seed).standard_normal(new.shape)
    want = (exact(new + step) - exact(new - step)) / 2
    assert (gradient * step).sum() == pytest.approx(want, rel=2e-3, abs=1e-8)


@pytest.mark.parametrize(('size', 'tail'), [(64, 1e-5), (3, 1e-5), (64, 0.3)])
def test_support_is_the_likely_words_the_sampled_one_and_the_rest(size, tail):
  new, old, target = _logits(3, 40)
  new, old = _log_softmax(new), _log_softmax(old)
  found = projection.likely_words(
    jnp.asarray(old, jnp.float32), jnp.asarray(target, jnp.int32), size=size, tail=tail
  )
  now = projection.on_support(
    jnp.asarray(new, jnp.float32), jnp.asarray(target, jnp.int32), proximal=found
  )
  lengths = set()
  for i in range(40):
    kept = _support(old[i], target[i], size, tail)
    ids = np.asarray(found['ids'][i])
    assert set(ids[ids >= 0]) == set(kept) and (ids >= 0).sum() == len(kept)
    assert ids[int(found['place'][i])] == target[i]
    used = np.append(ids >= 0, True)
    for got, row in ((found['old'][i], old[i]), (now['new'][i], new[i])):
      want = _cut(row, list(ids[ids >= 0]))
      np.testing.assert_allclose(np.exp(np.asarray(got)[used]), np.exp(want), atol=2e-6)
      assert np.exp(np.asarray(got, np.float64)[used]).sum() == pytest.approx(1.0, abs=1e-5)
    lengths.add(len(kept))
  assert max(lengths) == (min(size, WORDS) if tail < 0.1 and size > 3 else max(lengths))
  assert min(lengths) < WORDS or size > WORDS


def _expected(new, old, target, adv, mask, size, tail, coef, held=None):
  """The loss of a batch, token by token; `held` holds what is under stop_gradient."""
  total, projected = 0.0, []
  for i in np.flatnonzero(mask):
    kept = _support(old[i], target[i], size, tail)
    n, o = _cut(new[i], kept), _cut(old[i], kept)
    p = _project(n, o)
    place = kept.index(target[i])
    still = p if held is None else held[len(projected)]
    pull = _kl(n, still) if _kl(n, o) > DELTA else 0.0
    total += -adv[i] * np.exp(p[place] - o[place]) + coef * pull
    projected.append(p)
  return total / mask.sum(), projected


@pytest.mark.parametrize(('size', 'tail', 'coef'), [(64, 1e-5, 1.0), (3, 0.05, 0.5)])
def test_loss_and_gradient(size, tail, coef, whole_loss, make_inputs):
  inputs = make_inputs(seed=41)
  mask, shape = np.asarray(inputs.mask_t).reshape(-1), inputs.mask_t.shape
  new, old, target = _logits(4, mask.size, drift=0.4)
  old = _log_softmax(old)
  adv = np.where(mask, np.nan_to_num(np.asarray(inputs.adv_t)).reshape(-1), 0.0).astype(np.float64)
  text = f'troll(delta={DELTA}, coef={coef}, size={size}, tail={tail})'
  objective = resolve(corrections=(), trust_region=text)
  words = jnp.asarray(target, jnp.int32)
  scored = old[np.arange(mask.size), target].reshape(shape)
  inputs = inputs._replace(proximal_log_probs_t=jnp.asarray(scored, jnp.float32))

  def run(logits):
    policy = jax.nn.log_softmax(logits)
    held = proximal_terms(objective)(jnp.asarray(old, jnp.float32), words, {})
    found = merged(held, current_terms(objective, score_proximal=True)(policy, words, held))
    found = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)
    chosen = jnp.take_along_axis(policy, words[:, None], axis=-1)[:, 0].reshape(shape)
    parts = whole_loss(objective, inputs._replace(log_probs_t=chosen, vocabulary=found))
    return parts.loss, metrics.finished(parts)

  (loss, found), gradient = jax.value_and_grad(run, has_aux=True)(jnp.asarray(new, jnp.float32))
  args = (old, target, adv, mask, size, tail, coef)
  want, held = _expected(_log_softmax(new), *args)
  assert float(loss) == pytest.approx(want, rel=2e-5)
  assert 0.2 < float(found['projected_fraction']) < 1.0
  gradient = np.asarray(gradient, np.float64)
  assert not gradient[~mask].any()
  for seed in range(3):
    step = 1e-5 * np.random.default_rng(seed).standard_normal(new.shape)
    ends = [_expected(_log_softmax(new + sign * step), *args, held)[0] for sign in (1, -1)]
    assert (gradient * step).sum() == pytest.approx((ends[0] - ends[1]) / 2, rel=3e-3, abs=1e-9)


def test_where_the_policy_is_the_proximal_one_nothing_but_the_surrogate_is_left(
  whole_loss, make_inputs
):
  """As at one update per batch: ratio exactly 1, nothing projected, the gradient of −ρA."""
  inputs = make_inputs(seed=42)
  shape, count = inputs.mask_t.shape, inputs.mask_t.size
  logits, _, target = _logits(5, count)
  words = jnp.asarray(target, jnp.int32)
  gradients = {}
  for name in ('troll', 'none'):
    objective = resolve(corrections=(), trust_region=name)
    terms = current_terms(objective, score_proximal=False)

    def run(x, objective=objective, terms=terms):
      policy = jax.nn.log_softmax(x)
      chosen = jnp.take_along_axis(policy, words[:, None], axis=-1)[:, 0].reshape(shape)
      found = {} if terms is None else terms(policy, words, {})
      found = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)
      held = jax.lax.stop_gradient(chosen)
      now = inputs._replace(log_probs_t=chosen, proximal_log_probs_t=held, vocabulary=found)
      parts = whole_loss(objective, now)
      return parts.loss, metrics.finished(parts)

    (_, found), gradients[name] = jax.value_and_grad(run, has_aux=True)(
      jnp.asarray(logits, jnp.float32)
    )
    if name == 'troll':
      assert float(found['projected_fraction']) == 0.0 and float(found['ratio_max']) == 1.0
      assert float(found['kl_proximal']) == pytest.approx(0.0, abs=1e-7)
  np.testing.assert_allclose(gradients['troll'], gradients['none'], atol=1e-7)


@pytest.mark.parametrize('base', ['behaviour', 'log_linear'])
def test_bases_without_a_distribution_are_refused(base):
  with pytest.raises(ConfigError, match="troll compares whole distributions.*Set the ratio's base"):
    resolve(trust_region='troll', ratio=f'token(base="{base}")', corrections=())
  assert resolve(trust_region='troll', ratio='token(base="ema")').average_decay == 0.889
