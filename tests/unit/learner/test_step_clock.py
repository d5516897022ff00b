"""Parts end when the device ends them, whenever the host looks."""

import jax.numpy as jnp
import pytest

from rlax_stack.learner.step_clock import StepClock


class _Work:
  """A result that is there at `end_s` on the test's clock."""

  def __init__(self, clock, end_s):
    self._clock, self._end_s = clock, end_s

  def is_ready(self):
    return self._clock.now_s >= self._end_s

  def block_until_ready(self):
    self._clock.now_s = max(self._clock.now_s, self._end_s)


class _Clock:
  now_s = 5.0

  def __call__(self):
    return self.now_s


def test_parts_follow_each_other_as_the_device_ends_them():
  now = _Clock()
  clock = StepClock(clock=now)
  now.now_s = 6.0
  clock.done('data')
  clock.dispatched('log_probs', _Work(now, 5.5))  # done while it was dispatched
  now.now_s = 6.5
  clock.dispatched('log_probs', _Work(now, 9.0))
  clock.dispatched('train', _Work(now, 12.0))
  clock.dispatched('train', _Work(now, 12.5))
  assert clock.seconds() == {'data': 1.0, 'log_probs': 3.0, 'train': 3.5}
  now.now_s = 20.0
  assert clock.seconds() == {'data': 1.0, 'log_probs': 3.0, 'train': 3.5}


def test_it_waits_for_arrays():
  clock = StepClock()
  clock.dispatched('train', jnp.ones(3) + 1)
  assert clock.seconds()['train'] == pytest.approx(0.0, abs=60.0)


def test_the_learner_splits_its_time(make_learner, make_groups, settings):
  learner = make_learner()
  step = learner.train(make_groups())
  metrics, seconds = step.result(), step.seconds()
  assert set(seconds) == {'data', 'train'} and min(seconds.values()) > 0
  assert metrics['pairs_per_layer'] > metrics['row_tokens'] > 0
