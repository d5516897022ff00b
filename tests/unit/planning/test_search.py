"""Doubling until something does not fit."""

import pytest

from rlax_stack.planning.search import LargestFit, largest_fit


@pytest.mark.parametrize(
  ('capacity', 'most', 'want'),
  [
    (90, 1000, LargestFit(8, 80.0, 160.0)),
    (80, 1000, LargestFit(8, 80.0, 160.0)),
    (10**9, 20, LargestFit(32, 320.0, None)),  # nothing more would be put in
    (25, 1000, LargestFit(2, 20.0, 40.0)),
  ],
)
def test_the_largest_that_fits(capacity, most, want):
  tried = []

  def used_by(value):
    tried.append(value)
    return 10.0 * value

  assert largest_fit(used_by, start=2, used=20.0, capacity=capacity, most=most) == want
  assert tried == [2 * 2**i for i in range(1, len(tried) + 1)]


def test_what_the_compiler_refuses_does_not_fit():
  found = largest_fit(lambda value: None, start=3, used=1.0, capacity=10, most=100)
  assert found == LargestFit(3, 1.0, float('inf'))
