"""Loading single tasks, and keeping hostile answers away from scorers that evaluate."""

import importlib.util
import subprocess
import sys

import pytest

from rlax_stack.errors import DataError
from rlax_stack.rewards import pool_tasks, reasoning_gym_tasks

needs_reasoning_gym = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None, reason='reasoning-gym is not installed'
)


pytestmark = needs_reasoning_gym

_LOAD_ALONE = """
import sys
from rlax_stack.rewards.reasoning_gym_tasks import make_dataset
dataset = make_dataset('chain_sum', seed=0, size=3, task_kwargs={'max_terms': 2})
assert dataset[0]['answer'] == make_dataset('chain_sum', seed=0, size=1, task_kwargs={'max_terms': 2})[0]['answer']
left = [name for name in sys.modules if name.split('.')[0] in ('reasoning_gym', 'matplotlib', 'sympy', 'jax')]
assert not left, left
import reasoning_gym
assert reasoning_gym.create_dataset('chain_sum', seed=0, size=1, max_terms=2)[0]['answer'] == dataset[0]['answer']
"""


@pytest.mark.slow
def test_one_task_is_loaded_alone_and_the_package_still_imports():
  subprocess.run([sys.executable, '-W', 'ignore', '-c', _LOAD_ALONE], check=True, timeout=120)


def test_make_dataset_is_a_function_of_its_arguments():
  first = reasoning_gym_tasks.make_dataset('gcd', seed=3, size=2, task_kwargs={})
  second = reasoning_gym_tasks.make_dataset('gcd', seed=3, size=9, task_kwargs={})
  assert [first[0], first[1]] == [second[0], second[1]]


@pytest.mark.slow  # this one needs the whole package
def test_load_task_finds_nested_modules():
  dataset_cls, config_cls = reasoning_gym_tasks.load_task('gsm_symbolic')
  assert (dataset_cls.__name__, config_cls.__name__) == (
    'GSMSymbolicDataset',
    'GSMSymbolicDatasetConfig',
  )


@pytest.mark.slow
def test_unknown_task_answers_with_the_nearest():
  with pytest.raises(DataError, match="no task 'chain_sums'. The nearest names are: chain_sum,"):
    reasoning_gym_tasks.load_task('chain_sums')


@pytest.mark.parametrize('options', [{'min_term': 2}, {'min_terms': 0}, {'min_terms': 'two'}])
def test_refused_options_name_the_known_ones(options):
  with pytest.raises(DataError, match="'chain_sum' refuses its options.*min_digits"):
    reasoning_gym_tasks.make_dataset('chain_sum', seed=0, size=1, task_kwargs=options)


@pytest.mark.parametrize(
  ('task', 'answer', 'safe'),
  [
    ('n_queens', "[['Q', '_'], ['_', 'Q']]", True),
    ('n_queens', "__import__('os').system('x')", False),
    ('n_queens', '[x for x in ().__class__.__mro__]', False),
    ('countdown', '(3 + 4.5) * 2', True),
    ('countdown', 'exit()', False),
    ('puzzle24', '1 .real', False),
    ('simple_integration', '0.5*x**2 + sin(x) + C', True),
    ('simple_integration', 'preview(x)', False),
    ('polynomial_multiplication', 'x.__class__', False),
    ('chain_sum', "__import__('os')", True),  # its scorer only compares
  ],
)
def test_is_safe_answer(task, answer, safe):
  assert reasoning_gym_tasks.is_safe_answer(task, answer) is safe


def test_a_hostile_answer_is_scored_like_no_answer_and_not_run(tmp_path):
  mark = tmp_path / 'mark'
  dataset = reasoning_gym_tasks.make_dataset('n_queens', seed=0, size=1, task_kwargs={})
  payload = {'task': 'n_queens', 'task_kwargs': {}, 'entry': dataset[0]}
  hostile = f"__import__('pathlib').Path({str(mark)!r}).touch()"
  score = pool_tasks.reasoning_gym({**payload, 'answer': hostile})
  assert score == pool_tasks.reasoning_gym({**payload, 'answer': None}) == 0.0
  assert pool_tasks.reasoning_gym({**payload, 'answer': dataset[0]['answer']}) == 1.0
  assert not mark.exists()


def test_tasks_whose_scorers_evaluate_are_all_listed():
  assert set(reasoning_gym_tasks.SAFE_ANSWERS) == {
    'binary_matrix',
    'countdown',
    'intermediate_integration',
    'n_queens',
    'polynomial_multiplication',
    'puzzle24',
    'simple_integration',
    'spiral_matrix',
    'string_insertion',
  }
