"""Success told from a sample's beginning: features by hand, learning against known weights."""

import numpy as np

from rlax_stack.data.success_model import (
  NUM_FEATURES,
  new_success_model,
  prefix_features,
  success_probability,
  update_success_model,
)


def test_features_by_hand():
  log_probs = -np.arange(1, 41, dtype=np.float32)  # -1 ... -40
  found = prefix_features(log_probs, np.array([0, 2, 40]), rate=0.8, max_tokens=80)
  logit = np.log(4.0)
  want = [
    [1, logit, 0, 0, 0],
    [1, logit, -1.5, -1.5, 2 / 80],
    [1, logit, -20.5, -np.mean(np.arange(9, 41)), 0.5],
  ]
  np.testing.assert_allclose(found, want, rtol=1e-12)
  assert found.shape[1] == NUM_FEATURES


def test_a_new_model_tells_the_prompts_rate():
  for rate in (0.1, 0.5, 0.9):
    features = prefix_features(np.array([-3.0, -0.1]), np.array([0, 1, 2]), rate=rate, max_tokens=4)
    np.testing.assert_allclose(success_probability(new_success_model().mean, features), rate)


def test_one_update_by_hand():
  """With one row of features: the scalar Newton step along it."""
  model, x = new_success_model(), np.array([[1.0, 0.0, 0.0, 0.0, 0.0]])
  found = update_success_model(model, x, np.array([1.0]), memory=1.0)
  # p = 1/2: precision 4 + 1/4, gradient 1/2.
  np.testing.assert_allclose(found.precision[0, 0], 4.25)
  np.testing.assert_allclose(found.mean, [0.5 / 4.25, 1.0, 0.0, 0.0, 0.0])
  # What is forgotten falls back to the prior, which was all there was.
  faded = update_success_model(model, x, np.array([1.0]), memory=0.5)
  np.testing.assert_allclose(faded.precision[0, 0], 4.25)


def test_it_learns_which_beginnings_succeed():
  rng = np.random.default_rng(0)
  true = np.array([0.5, 0.6, 1.5, 0.0, -2.0])
  model = new_success_model()

  def batch(count):
    rates = rng.uniform(0.1, 0.9, count)
    rows = [
      prefix_features(rng.uniform(-3, 0, 20), rng.integers(0, 21, 1), rate=rate, max_tokens=20)
      for rate in rates
    ]
    features = np.concatenate(rows)
    return features, (rng.random(count) < success_probability(true, features)).astype(float)

  for _ in range(150):
    model = update_success_model(model, *batch(64))
  features, _ = batch(2000)
  gap = success_probability(model.mean, features) - success_probability(true, features)
  assert np.abs(gap).mean() < 0.03
  prior = success_probability(new_success_model().mean, features)
  assert np.abs(prior - success_probability(true, features)).mean() > 0.1
