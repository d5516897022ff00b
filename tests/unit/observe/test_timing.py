"""The parts of a lap sum to the lap, on a clock that the test moves."""

import threading

import pytest

from rlax_stack.observe.timing import Lap, TimeSplit


class Clock:
  now_s = 100.0

  def __call__(self):
    return self.now_s


def test_parts_and_other_sum_to_the_lap():
  clock = Clock()
  split = TimeSplit(clock=clock)
  with split.measure('generate'):
    clock.now_s += 6
  clock.now_s += 1
  with split.measure('train'):
    clock.now_s += 3
  lap = split.lap()
  assert lap.seconds == {'generate': 6.0, 'train': 3.0, 'other': 1.0}
  assert lap.total_s == 10.0
  assert lap.fractions == {'generate': 0.6, 'train': 0.3, 'other': 0.1}
  clock.now_s += 2
  assert split.lap() == Lap({'other': 2.0}, 2.0)


def test_a_nested_part_is_taken_out_of_the_outer_one():
  clock = Clock()
  split = TimeSplit(clock=clock)
  with split.measure('train'):
    clock.now_s += 1
    with split.measure('publish'):
      clock.now_s += 4
    clock.now_s += 1
  assert split.lap().seconds == {'publish': 4.0, 'train': 2.0, 'other': 0.0}


def test_an_exception_is_measured_too():
  clock = Clock()
  split = TimeSplit(clock=clock)
  with pytest.raises(KeyError), split.measure('score'):
    clock.now_s += 2
    raise KeyError
  assert split.lap().seconds['score'] == 2.0


def test_other_threads_may_add_and_an_empty_lap_has_no_fractions():
  clock = Clock()
  split = TimeSplit(clock=clock)
  threads = [threading.Thread(target=split.add, args=('score', 0.5)) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  lap = split.lap()
  assert lap.seconds == {'score': 4.0, 'other': 0.0}
  assert lap.fractions == {'score': 0.0, 'other': 0.0}


def test_time_moves_no_further_than_there_is():
  clock = Clock()
  split = TimeSplit(clock=clock)
  with split.measure('generate'):
    clock.now_s += 4
  split.move('generate', 'score', 1.0)
  split.move('generate', 'score', 9.0)
  split.move('absent', 'score', 2.0)
  split.move('score', 'generate', -1.0)
  assert split.lap().seconds == {'generate': 0.0, 'score': 4.0, 'absent': 0.0, 'other': 0.0}
