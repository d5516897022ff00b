"""The sampler against numpy float64: supports, probabilities, log-probs, and draws by chi-square."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack import rng
from rlax_stack.rollout.sampler import RowSampling, filter_threshold, sample

_VOCABULARY, _DRAWS = 301, 4096
_sample = jax.jit(sample)


def _sampling(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  def column(value, dtype):
    return np.broadcast_to(np.asarray(value, dtype), (rows,)).copy()

  return RowSampling(
    column(temperature, np.float32),
    column(top_k, np.int32),
    column(top_p, np.float32),
    column(min_p, np.float32),
  )


def _logits(seed=0):
  return 2 * np.random.default_rng(seed).normal(size=_VOCABULARY).astype(np.float32)


def _uniforms(rows, seed=0):
  key = rng.sample_key_data(seed, 0, 0)
  return rng.token_uniforms(np.broadcast_to(key, (rows, 2)), np.arange(rows, dtype=np.int32))


def _processed(logits, temperature, top_k, top_p, min_p):
  """Probabilities after temperature, top-k, top-p, min-p, by sorting, float64."""
  scores = logits.astype(np.float64) / temperature
  probabilities = np.exp(scores - scores.max())
  probabilities /= probabilities.sum()
  order = np.argsort(-probabilities, kind='stable')
  keep = np.ones(len(logits), bool)
  if top_k:
    keep[order[top_k:]] = False
  inside = np.where(keep, probabilities, 0)
  inside /= inside.sum()
  if top_p < 1:
    before = np.cumsum(inside[order]) - inside[order]
    keep[order[before >= top_p]] = False
  if min_p:
    keep &= probabilities >= min_p * probabilities.max()
  inside = np.where(keep, probabilities, 0)
  return inside / inside.sum()


_SETTINGS = [
  (1.0, 0, 1.0, 0.0),
  (0.7, 0, 1.0, 0.0),
  (1.5, 5, 1.0, 0.0),
  (1.0, 1, 1.0, 0.0),
  (1.0, 0, 0.8, 0.0),
  (1.3, 0, 0.05, 0.0),
  (1.0, 0, 1.0, 0.2),
  (0.9, 20, 0.7, 0.05),
]


@pytest.mark.parametrize('setting', _SETTINGS)
def test_draws_follow_the_processed_distribution(setting):
  logits = _logits()
  columns = jnp.broadcast_to(logits[:, None], (_VOCABULARY, _DRAWS))
  drawn = jax.device_get(_sample(columns, _uniforms(_DRAWS), _sampling(_DRAWS, *setting)))
  want = _processed(logits, *setting)
  assert set(np.unique(drawn.token)) <= set(np.flatnonzero(want))
  np.testing.assert_allclose(drawn.log_prob, np.log(want[drawn.token]), atol=2e-5)
  raw = np.log(_processed(logits, 1.0, 0, 1.0, 0.0))
  np.testing.assert_allclose(drawn.raw_log_prob, raw[drawn.token], atol=2e-5)
  expected = want * _DRAWS
  common = expected >= 5
  counts = np.bincount(drawn.token, minlength=_VOCABULARY)
  observed = np.append(counts[common], counts[~common].sum())
  expected = np.append(expected[common], expected[~common].sum())
  chi_square = ((observed - expected) ** 2 / np.maximum(expected, 1)).sum()
  freedom = len(observed) - 1
  # Five standard deviations of a chi-square variable.
  assert chi_square <= freedom + 5 * np.sqrt(2 * freedom) + 5


def test_rows_keep_their_own_settings():
  rows = len(_SETTINGS) + 1
  logits = np.stack([_logits(i) for i in range(rows)], 1)
  settings = [*_SETTINGS, (0.0, 3, 0.5, 0.5)]
  sampling = RowSampling(*(np.asarray(x) for x in zip(*settings, strict=True)))
  sampling = jax.tree.map(lambda x, like: x.astype(like.dtype), sampling, _sampling(rows))
  uniforms = np.asarray(_uniforms(rows))
  together = jax.device_get(_sample(logits, uniforms, sampling))
  for i, setting in enumerate(settings):
    if setting[0] == 0:
      assert together.token[i] == logits[:, i].argmax()
      assert together.log_prob[i] == 0
      continue
    want = _processed(logits[:, i], *setting)
    assert want[together.token[i]] > 0
    np.testing.assert_allclose(together.log_prob[i], np.log(want[together.token[i]]), atol=2e-5)
    alone = jax.device_get(
      _sample(logits[:, [i] * rows], uniforms[[i] * rows], _sampling(rows, *setting))
    )
    assert alone.token[0] == together.token[i]


def test_ties_at_the_threshold_are_all_kept():
  scores = np.array([0.0, -1.0, -1.0, -1.0, -2.0], np.float32)[:, None]
  got = filter_threshold(jnp.asarray(scores), _sampling(1, top_k=2))
  np.testing.assert_array_equal(got, [-1.0])


def test_thresholds_are_exact_logits():
  scores = _logits(4)
  scores = (scores - scores.max())[:, None]
  ordered = np.sort(scores[:, 0])[::-1]
  for k in (1, 2, 17, _VOCABULARY, 10**6):
    got = float(filter_threshold(jnp.asarray(scores), _sampling(1, top_k=k))[0])
    assert got == ordered[min(k, _VOCABULARY) - 1]


@pytest.mark.parametrize('uniform', [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize('top_k', [0, 3])
def test_extreme_uniforms_stay_inside_the_support(uniform, top_k):
  logits = _logits(2)[:, None]
  logits[[0, -1]] = -np.inf  # removed tokens at both ends
  drawn = _sample(logits, np.full((1, 2), uniform, np.float32), _sampling(1, top_k=top_k))
  want = _processed(logits[:, 0], 1.0, top_k, 1.0, 0.0)
  assert want[int(drawn.token[0])] > 0
  assert np.isfinite(drawn.log_prob).all()
