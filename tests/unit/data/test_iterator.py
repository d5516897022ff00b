"""Order, epochs and exact resumption of the prompt iterator."""

import json
import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from rlax_stack.data.iterator import PromptIterator
from rlax_stack.data.source import PromptSource
from rlax_stack.errors import CheckpointError, DataError
from rlax_stack.types import Message, Prompt


def make_source(size, name='p'):
  messages = (Message(role='user', content='q'),)
  prompts = [Prompt(prompt_id=f'{name}{i}', messages=messages, answer='') for i in range(size)]
  return PromptSource(name, prompts)


def take(iterator, count):
  return [iterator.next().prompt_id for _ in range(count)]


def test_each_epoch_visits_every_prompt_once_in_an_order_of_its_own():
  iterator = PromptIterator(make_source(20), seed=1)
  epochs = [take(iterator, 20) for _ in range(3)]
  assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 20 for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  assert take(PromptIterator(make_source(20), seed=1), 60) == sum(epochs, [])
  assert take(PromptIterator(make_source(20), seed=2), 20) != epochs[0]


def test_without_shuffle_the_source_is_followed():
  iterator = PromptIterator(make_source(3), shuffle=False)
  assert take(iterator, 7) == ['p0', 'p1', 'p2', 'p0', 'p1', 'p2', 'p0']
  assert (iterator.num_taken, iterator.epoch) == (7, 2)


def test_it_is_an_iterator_in_this_thread():
  threads = threading.active_count()
  iterator = PromptIterator(make_source(3))
  assert iter(iterator) is iterator
  assert next(iterator).prompt_id in {'p0', 'p1', 'p2'}
  assert threading.active_count() == threads


@hypothesis.settings(max_examples=8)
@hypothesis.given(
  st.integers(1, 40), st.integers(0, 45), st.integers(0, 9), st.integers(0, 2**32 - 1)
)
def test_restored_goes_on_with_the_same_prompts(size, before, abandoned, seed):
  iterator = PromptIterator(make_source(size), seed=seed)
  take(iterator, before)
  state = json.loads(json.dumps(iterator.get_state()))
  expected = take(iterator, 12)
  other = PromptIterator(make_source(size), seed=seed)
  take(other, abandoned)
  other.set_state(state)
  assert (other.num_taken, other.epoch) == (before, before // size)
  assert take(other, 12) == expected


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    (lambda: PromptIterator(make_source(4)), 'has source='),
    (lambda: PromptIterator(make_source(5, 'x')), 'has source='),
    (lambda: PromptIterator(make_source(5), seed=1), 'has seed=0, this run has 1'),
    (lambda: PromptIterator(make_source(5), shuffle=False), 'has shuffle=True, this run has False'),
  ],
)
def test_a_position_in_other_prompts_is_refused(other, message):
  state = PromptIterator(make_source(5)).get_state()
  with pytest.raises(CheckpointError, match=message):
    other().set_state(state)


@pytest.mark.parametrize('seed', [-1, 2**32])
def test_seeds_out_of_range_are_refused(seed):
  with pytest.raises(DataError, match='must be in'):
    PromptIterator(make_source(2), seed=seed)
