"""reasoning-gym tasks as prompt sources."""

import importlib.util
import json

import pytest

from rlax_stack.data.procedural import reasoning_gym_source
from rlax_stack.errors import DataError
from rlax_stack.rewards import verifiers
from rlax_stack.rewards.pool_tasks import reasoning_gym

needs_reasoning_gym = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None, reason='reasoning-gym is not installed'
)


pytestmark = needs_reasoning_gym

ONE_DIGIT = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1}


def test_one_digit_sums_of_two_terms_are_200_problems():
  source = reasoning_gym_source('chain_sum', size=3000, task_kwargs=ONE_DIGIT)
  assert len(source) == 200
  expressions = {prompt.metadata['entry']['metadata']['expression'] for prompt in source}
  assert expressions == {f'{a} {op} {b}' for a in range(10) for b in range(10) for op in '+-'}
  for prompt in source:
    left, operator, right = prompt.metadata['entry']['metadata']['expression'].split()
    assert int(prompt.answer) == int(left) + (1 if operator == '+' else -1) * int(right)


def test_prompts_do_not_depend_on_size_and_carry_json():
  few = reasoning_gym_source('chain_sum', size=20, seed=4, task_kwargs=ONE_DIGIT)
  many = reasoning_gym_source('chain_sum', size=200, seed=4, task_kwargs=ONE_DIGIT)
  assert list(few) == list(many[: len(few)])
  assert json.loads(json.dumps(few[0].metadata)) == few[0].metadata
  other = reasoning_gym_source('chain_sum', size=3000, seed=9, task_kwargs=ONE_DIGIT)
  assert {prompt.prompt_id for prompt in few} <= {prompt.prompt_id for prompt in other}


def test_template_and_system_prompt():
  source = reasoning_gym_source(
    'gcd', size=1, prompt_template='{question}\nOnly the number.', system_prompt='s'
  )
  assert [message.role for message in source[0].messages] == ['system', 'user']
  assert source[0].messages[1].content == source[0].metadata['question'] + '\nOnly the number.'


@pytest.mark.parametrize('task', ['chain_sum', 'gcd', 'n_queens', 'time_intervals'])
def test_the_tasks_own_scorer_takes_its_prompts(task):
  prompt = reasoning_gym_source(task, size=1, seed=1)[0]
  built = verifiers.reasoning_gym().task(prompt.answer, prompt)
  assert reasoning_gym(json.loads(json.dumps(built.payload))) == 1.0
  assert reasoning_gym({**built.payload, 'answer': None}) < 0.1


def test_what_is_refused():
  with pytest.raises(DataError, match='size of at least 1, got size=0'):
    reasoning_gym_source('gcd', size=0)
  with pytest.raises(DataError, match="'gcd' refuses its options.*max_value"):
    reasoning_gym_source('gcd', task_kwargs={'largest': 3})
  with pytest.raises(DataError, match="names the field 'answer'"):
    reasoning_gym_source('gcd', prompt_template='{answer}')


@pytest.mark.slow  # only the whole package knows all names
def test_unknown_tasks_and_scorers_that_need_more_than_json_are_refused():
  with pytest.raises(DataError, match="no task 'chainsum'. The nearest names are: chain_sum"):
    reasoning_gym_source('chainsum')
  with pytest.raises(DataError, match="scorer of the reasoning-gym task 'rearc' does not survive"):
    reasoning_gym_source('rearc', size=1)
