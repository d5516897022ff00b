"""A held-out problem never occurs in training, whatever the sources."""

import hypothesis
import pytest
from hypothesis import strategies as st

from rlax_stack.data import split
from rlax_stack.data.source import PromptSource, question_key
from rlax_stack.errors import DataError
from rlax_stack.types import Message, Prompt

_QUESTIONS = st.lists(
  st.text(alphabet='01+- A', min_size=1, max_size=6).filter(str.strip), min_size=1, max_size=40
)


def make_source(name, questions, template='{}'):
  prompts = [
    Prompt(
      prompt_id=f'{name}/{i}',
      messages=(Message(role='user', content=template.format(question)),),
      answer='',
      metadata={'question': question},
    )
    for i, question in enumerate(questions)
  ]
  return PromptSource(name, prompts)


def keys(prompts):
  return {question_key(prompt) for prompt in prompts}


def side_or_nothing(source, side, **options):
  try:
    return list(split.take_side(source, side, **options))
  except DataError:
    return []


@hypothesis.given(_QUESTIONS, _QUESTIONS, st.integers(2, 7), st.text(max_size=3))
def test_sides_are_disjoint_across_sources_and_complete(first, second, every, salt):
  options = {'held_out_every': every, 'salt': salt}
  one, two = make_source('one', first), make_source('two', second, 'Please: {}')
  train, held_out = (
    side_or_nothing(one, 'train', **options),
    side_or_nothing(two, 'held_out', **options),
  )
  assert not keys(train) & keys(held_out)
  assert sorted([*train, *side_or_nothing(one, 'held_out', **options)], key=id) == sorted(
    one, key=id
  )


@hypothesis.given(_QUESTIONS, _QUESTIONS)
def test_exclude_leaves_no_held_out_problem_and_drops_no_other(train, held_out):
  source, kept_out = make_source('train', train, 'Solve {}'), make_source('eval', held_out)
  if keys(source) <= keys(kept_out):
    with pytest.raises(DataError, match='are held out, so none is left to train on'):
      split.exclude(source, kept_out)
    return
  left = split.exclude(source, kept_out)
  assert not keys(left) & keys(kept_out)
  assert keys(left) == keys(source) - keys(kept_out)


def test_white_space_and_case_do_not_make_another_problem():
  source = make_source('s', ['1 + 1', 'Two?'])
  left = split.exclude(source, make_source('e', [' 1  +\n1 ']))
  assert [prompt.metadata['question'] for prompt in left] == ['Two?']
  with pytest.raises(DataError, match='all 2 problems of s'):
    split.exclude(source, make_source('e', ['1 + 1', 'two?']))


def test_split_by_content_is_of_the_size_asked_for():
  source = make_source('s', [f'question {i}' for i in range(2000)])
  train, held_out = split.split_by_content(source, held_out_every=5)
  assert len(train) + len(held_out) == 2000 and 330 < len(held_out) < 470
  salted = split.split_by_content(source, held_out_every=5, salt='another')[1]
  assert keys(salted) != keys(held_out)
  assert all(split.is_held_out(prompt, held_out_every=5) for prompt in held_out)


def test_what_is_refused():
  source = make_source('s', ['q'])
  assert split.take_side(source, 'all') is source
  with pytest.raises(DataError, match="one of all, train, held_out, got 'test'"):
    split.take_side(source, 'test')
  with pytest.raises(DataError, match='held_out_every must be at least 2'):
    split.take_side(source, 'train', held_out_every=1)
  with pytest.raises(DataError, match='is empty'):
    split.split_by_content(source)
