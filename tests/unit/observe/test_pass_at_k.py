"""pass@k against exact integer binomials, and at sizes where a naive formula fails."""

import math

import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.observe.pass_at_k import mean_pass_at_k, pass_at_k


def exact(n: int, c: int, k: int) -> float:
  return 1 - math.comb(n - c, k) / math.comb(n, k)


def test_every_small_case_equals_the_binomial_formula():
  for n in range(1, 13):
    for c in range(n + 1):
      for k in range(1, n + 1):
        assert pass_at_k(n, c, k=k) == pytest.approx(exact(n, c, k), abs=1e-14), (n, c, k)


def test_values():
  result = pass_at_k([10, 10, 5, 4], [3, 0, 5, 1], k=2)
  np.testing.assert_allclose(result, [1 - 21 / 45, 0.0, 1.0, 0.5], atol=1e-15)
  assert result.dtype == np.float64
  assert mean_pass_at_k([10, 4], [3, 1], k=2) == pytest.approx((24 / 45 + 0.5) / 2)


def test_k_one_is_accuracy():
  np.testing.assert_allclose(pass_at_k(8, np.arange(9), k=1), np.arange(9) / 8, atol=1e-15)


def test_large_counts_neither_overflow_nor_cancel():
  assert pass_at_k(100_000, 50, k=1000) == pytest.approx(
    float(1 - math.prod((100_000 - 50 - j) / (100_000 - j) for j in range(1000))), rel=1e-9
  )
  # One right sample in n gives exactly k / n, which 1 - (1 - small) would lose digits of.
  assert pass_at_k(10**9, 1, k=3) == pytest.approx(3e-9, rel=1e-12)


@pytest.mark.parametrize(
  ('n', 'c', 'k', 'what'),
  [
    (4, 1, 0, 'k must be at least 1'),
    ([8, 4], [1, 1], 5, 'at least 5 samples of every problem, got 4'),
    (4, 5, 1, 'number of right samples'),
    (4, -1, 1, 'number of right samples'),
    (4.0, 1.0, 1, 'integers'),
  ],
)
def test_bad_counts_are_refused(n, c, k, what):
  with pytest.raises(ConfigError, match=what):
    pass_at_k(n, c, k=k)


def test_mean_of_no_problem_is_refused():
  with pytest.raises(ConfigError, match='zero problems'):
    mean_pass_at_k([], [], k=1)
