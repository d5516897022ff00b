"""Sources by name."""

import importlib.util
import json

import pytest

from rlax_stack.data import factory
from rlax_stack.data.source import question_key
from rlax_stack.data.split import exclude
from rlax_stack.errors import DataError

needs_reasoning_gym = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None, reason='reasoning-gym is not installed'
)


ONE_DIGIT = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1}


@pytest.fixture
def path(tmp_path):
  file = tmp_path / 'tasks.jsonl'
  lines = [json.dumps({'question': f'{i} + 1 =', 'answer': str(i + 1)}) for i in range(40)]
  file.write_text('\n'.join(lines))
  return str(file)


def test_build_source_with_side_and_limit(path):
  everything = factory.build_source('jsonl', path=path)
  train = factory.build_source('jsonl', path=path, side='train', held_out_every=4)
  held_out = factory.build_source('jsonl', path=path, side='held_out', held_out_every=4)
  assert len(everything) == 40 == len(train) + len(held_out)
  limited = factory.build_source('jsonl', path=path, side='train', held_out_every=4, limit=3)
  assert list(limited) == list(train[:3])


@pytest.mark.parametrize(
  ('kind', 'options', 'message'),
  [
    ('csv', {}, "no prompt source 'csv'. The kinds are: gsm8k, jsonl, reasoning_gym"),
    ('jsonl', {}, "'jsonl' needs the option 'path'"),
    ('jsonl', {'path': 'x', 'prompt_templat': ''}, 'The nearest are: prompt_template'),
    ('jsonl', {'path': 'x', 'limit': 0}, 'limit of a source must be at least 1'),
  ],
)
def test_build_source_refuses(kind, options, message):
  with pytest.raises(DataError, match=message):
    factory.build_source(kind, **options)


@needs_reasoning_gym
def test_training_draws_share_no_problem_with_held_out_draws():
  options = {'task': 'chain_sum', 'task_kwargs': ONE_DIGIT}
  held_out = factory.build_source('reasoning_gym', size=64, seed=1, **options)
  drawn = factory.build_source('reasoning_gym', size=1000, seed=0, **options)
  train = exclude(drawn, held_out)
  train_keys, held_out_keys = ({question_key(p) for p in source} for source in (train, held_out))
  assert held_out_keys & {question_key(prompt) for prompt in drawn}
  assert not train_keys & held_out_keys
  assert len(held_out) == 55 and len(train) + len(held_out) in (199, 200)
