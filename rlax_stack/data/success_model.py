"""How likely a sample is to succeed, told from its beginning: logistic regression, learnt as a run goes.

Pure functions on numpy arrays; the state is a mean and a precision matrix. What is learnt is shared by all prompts: a
prompt enters by its own rate of success alone. Idea: a success predictor that guides where a tree of samples branches,
"TRACE", Zou et al. (https://arxiv.org/abs/2606.11119); features and estimator are ours.
"""

from typing import NamedTuple

import numpy as np

_WINDOW = 32  # latest tokens whose log-probs are a feature of their own
NUM_FEATURES = 5


class SuccessModel(NamedTuple):
  """A Gaussian over the weights w of P(success) = σ(w · x)."""

  mean: np.ndarray  # float64 [NUM_FEATURES]
  precision: np.ndarray  # float64 [NUM_FEATURES, NUM_FEATURES]


def new_success_model() -> SuccessModel:
  """The prior: a sample succeeds at its prompt's rate, whatever it begins with."""
  mean = np.zeros(NUM_FEATURES)
  mean[1] = 1.0
  return SuccessModel(mean, np.diag([4.0, 4.0, 1.0, 1.0, 1.0]))


def prefix_features(
  raw_log_probs: np.ndarray, depths: np.ndarray, *, rate: float, max_tokens: int
) -> np.ndarray:
  """What is known of a sample after each of some numbers of its tokens.

  Args:
    raw_log_probs: float [T], of the sample's tokens under the model at temperature 1.
    depths: int [N], tokens of each prefix, from 0 to T.
    rate: of success of its prompt, in (0, 1).
    max_tokens: that a sample may have.

  Returns:
    float64 [N, NUM_FEATURES]: 1, the rate's logit, the mean log-prob of the prefix and that of its last 32 tokens (0 of
    none), and the share of `max_tokens` that is used.
  """
  depths = np.asarray(depths, np.int64)
  sums = np.concatenate([[0.0], np.cumsum(np.asarray(raw_log_probs, np.float64))])
  recent = np.maximum(depths - _WINDOW, 0)
  return np.stack(
    [
      np.ones(len(depths)),
      np.full(len(depths), np.log(rate) - np.log1p(-rate)),
      sums[depths] / np.maximum(depths, 1),
      (sums[depths] - sums[recent]) / np.maximum(depths - recent, 1),
      depths / max_tokens,
    ],
    axis=-1,
  )


def success_probability(mean: np.ndarray, features: np.ndarray) -> np.ndarray:
  """P(success) of rows of features [N, NUM_FEATURES], float64 [N]."""
  return 1 / (1 + np.exp(-np.clip(features @ mean, -30.0, 30.0)))


def update_success_model(
  model: SuccessModel, features: np.ndarray, success: np.ndarray, *, memory: float = 0.99
) -> SuccessModel:
  """The model after one batch of outcomes: Laplace's approximation around the old mean, one Newton step.

    Λ' = memory Λ + Xᵀ diag(p (1 − p)) X,   m' = m + Λ'⁻¹ Xᵀ (y − p)

  Args:
    model: before the batch.
    features: X, float64 [N, NUM_FEATURES].
    success: y, float [N] in [0, 1].
    memory: what older batches weigh, since the policy that made them is gone.
  """
  probability = success_probability(model.mean, features)
  spread = np.maximum(probability * (1 - probability), 1e-6)
  floor = (1 - memory) * np.diag([4.0, 4.0, 1.0, 1.0, 1.0])  # the prior is never forgotten
  precision = memory * model.precision + floor + (features.T * spread) @ features
  step = np.linalg.solve(precision, features.T @ (np.asarray(success, np.float64) - probability))
  return SuccessModel(model.mean + np.clip(step, -1.0, 1.0), precision)
