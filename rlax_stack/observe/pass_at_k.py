"""The unbiased estimator of pass@k: how often at least one of k samples is right.

Not for drawing samples: give it how many were drawn and how many were right, per problem.
Invariant: the result lies in [0, 1], and for k = 1 it is the plain accuracy.
See "Evaluating Large Language Models Trained on Code", Chen et al. (https://arxiv.org/abs/2107.03374).
"""

import numpy as np
from numpy.typing import ArrayLike

from rlax_stack.errors import ConfigError


def pass_at_k(num_samples: ArrayLike, num_correct: ArrayLike, *, k: int) -> np.ndarray:
  """1 - C(n-c, k) / C(n, k) per problem, as a running product that neither overflows nor cancels.

  Args:
    num_samples: n, samples drawn per problem; int, a scalar or [P].
    num_correct: c, how many of them were right, 0 <= c <= n; int, a scalar or [P].
    k: samples that a user would draw, 1 <= k <= n for every problem.

  Returns: float64, the broadcast shape of the two arguments.
  Raises: ConfigError (a ValueError) for k < 1, k > n, c < 0, c > n, or counts that are not
  integers.
  """
  n, c = np.broadcast_arrays(np.asarray(num_samples), np.asarray(num_correct))
  _check(n, c, k)
  result = np.ones(n.shape, np.float64)
  for index in np.ndindex(n.shape):
    wrong = int(n[index]) - int(c[index])
    if wrong >= k:
      # C(n-c, k) / C(n, k) = prod_j (n-c-j)/(n-j) = exp(sum_j log(1 - c/(n-j))), j = 0 .. k-1.
      terms = np.log1p(-float(c[index]) / (float(n[index]) - np.arange(k, dtype=np.float64)))
      result[index] = -np.expm1(terms.sum())
  return result


def mean_pass_at_k(num_samples: ArrayLike, num_correct: ArrayLike, *, k: int) -> float:
  """Mean of `pass_at_k` over problems (each problem counts once, however many samples it has).

  Raises: ConfigError as `pass_at_k` does, and when there is no problem at all.
  """
  estimates = pass_at_k(num_samples, num_correct, k=k)
  if estimates.size == 0:
    raise ConfigError('pass@k of zero problems is undefined. Give at least one problem.')
  return float(estimates.mean())


def _check(n: np.ndarray, c: np.ndarray, k: int) -> None:
  if k < 1:
    raise ConfigError(f'k must be at least 1, got {k=}.')
  if not (np.issubdtype(n.dtype, np.integer) and np.issubdtype(c.dtype, np.integer)):
    if n.size:
      raise ConfigError(f'counts must be integers, got dtypes {n.dtype} and {c.dtype}.')
  if n.size and k > n.min():
    raise ConfigError(
      f'pass@{k} needs at least {k} samples of every problem, got {int(n.min())}. '
      'Draw more samples or lower k.'
    )
  if n.size and ((c < 0).any() or (c > n).any()):
    raise ConfigError(
      'the number of right samples must lie in 0 .. number of samples of that problem.'
    )
