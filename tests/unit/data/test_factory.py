"""Sources by name, and from the config's sections."""

import dataclasses
import importlib.util
import json

import pytest

from rlax_stack.config import DataSection, SourceSection
from rlax_stack.data import factory
from rlax_stack.data.source import question_key
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


def section(**changes):
  base = SourceSection(
    kind='reasoning_gym',
    path='',
    split='train',
    prompt_template='{question}',
    answer_field='answer',
    task='chain_sum',
    task_options=ONE_DIGIT,
    size=1000,
    seed=0,
    system_prompt='',
  )
  return dataclasses.replace(base, **changes)


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


def test_source_from_section_reads_what_its_kind_knows(path):
  source = factory.source_from_section(section(kind='jsonl', path=path, size=7, system_prompt='s'))
  assert len(source) == 7 and source[0].messages[0].content == 's'
  assert len(factory.source_from_section(section(kind='jsonl', path=path, size=0))) == 40
  with pytest.raises(DataError, match='The kinds are'):
    factory.source_from_section(section(kind='csv'))


@needs_reasoning_gym
def test_train_and_eval_sources_share_no_problem():
  data = DataSection(train=section(), eval=section(size=64, seed=1), exclude_eval=True)
  train, held_out = factory.train_and_eval_sources(data)
  train_keys, held_out_keys = ({question_key(p) for p in source} for source in (train, held_out))
  assert not train_keys & held_out_keys
  assert len(held_out) == 55 and len(train) + len(held_out) in (199, 200)
  together, _ = factory.train_and_eval_sources(dataclasses.replace(data, exclude_eval=False))
  assert held_out_keys & {question_key(p) for p in together}
