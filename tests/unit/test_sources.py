"""From config sections to sources, verifiers and sampling parameters."""

import dataclasses
import json

import pytest

from configs import base
from rlax_stack import sources
from rlax_stack.config import from_config_dict
from rlax_stack.errors import DataError
from rlax_stack.types import SamplingParams


def write(path, questions):
  path.write_text(''.join(json.dumps({'question': q, 'answer': a}) + '\n' for q, a in questions))
  return str(path)


def config_of(tmp_path, train, held_out, **changes):
  config = base.get_config()
  for name, questions in (('train', train), ('eval', held_out)):
    path = write(tmp_path / f'{name}.jsonl', questions)
    config.data[name] = base.source(kind='jsonl', path=path, size=0)
  config.update_from_flattened_dict(changes)
  return from_config_dict(config)


def test_held_out_prompts_leave_the_training_ones(tmp_path):
  config = config_of(tmp_path, [('a', '1'), ('b', '2'), ('c', '3')], [('b', '2')])
  train, held_out = sources.make_sources(config)
  assert [prompt.answer for prompt in train] == ['1', '3']
  assert [prompt.answer for prompt in held_out] == ['2']
  both = dataclasses.replace(config, data=dataclasses.replace(config.data, exclude_eval=False))
  assert len(sources.make_sources(both)[0]) == 3


def test_nothing_left_to_train_on(tmp_path):
  with pytest.raises(DataError):
    sources.make_sources(config_of(tmp_path, [('b', '2')], [('b', '2')]))


def test_size_limits_a_file(tmp_path):
  config = config_of(
    tmp_path, [('a', '1'), ('b', '2'), ('c', '3')], [('d', '4')], **{'data.train.size': 2}
  )
  assert [prompt.answer for prompt in sources.make_source(config.data.train)] == ['1', '2']


def test_chain_takes_names_weights_and_options(tmp_path):
  config = from_config_dict(base.get_config())
  verifiers = {
    'number': {'weight': 1.0},
    'tagged': {'name': 'exact', 'weight': 0.5, 'extract_how': 'tag'},
  }
  section = dataclasses.replace(config.rewards, verifiers=verifiers)
  prompt = sources.make_source(config_of(tmp_path, [('a', '7')], [('b', '2')]).data.train)[0]
  with sources.make_chain(section) as chain:
    (reward,) = chain.score(['so <answer>7</answer>'], [prompt])
  assert reward.parts == {'number': 1.0, 'tagged': 1.0} and reward.value == 1.5


def test_sampling_of_training_and_of_evaluation():
  config = base.get_config()
  config.rollout.update(temperature=0.7, top_k=5, top_p=0.9, max_tokens=9, stop_strings=('x',))
  config.eval.temperature = 0.0
  config.seed = 3
  frozen = from_config_dict(config)
  assert sources.train_sampling(frozen, (2,)) == SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    max_tokens=9,
    stop_token_ids=(2,),
    stop_strings=('x',),
    seed=3,
  )
  assert sources.eval_sampling(frozen, (2,)) == SamplingParams(
    temperature=0.0, max_tokens=9, stop_token_ids=(2,), stop_strings=('x',), seed=3
  )
