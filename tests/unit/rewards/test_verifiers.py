"""Values of every verifier, in process and as the pool would compute them."""

import importlib.util

import pytest

from rlax_stack.errors import ConfigError, RewardError
from rlax_stack.rewards import pool_tasks, verifiers
from rlax_stack.types import Message, Prompt

needs_reasoning_gym = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None, reason='reasoning-gym is not installed'
)


def make_prompt(answer, **metadata):
  messages = (Message(role='user', content='q'),)
  return Prompt(prompt_id='p/1', messages=messages, answer=answer, metadata=metadata)


def value_of(verifier, text, prompt):
  if verifier.score is not None:
    return verifier.score(text, prompt)
  task = verifier.task(text, prompt)
  return pool_tasks.TASKS[task.kind](dict(task.payload))


@pytest.mark.parametrize(
  ('text', 'answer', 'options', 'expected'),
  [
    ('  Paris. ', 'paris', {}, 1.0),
    ('New\n York', 'new york', {}, 1.0),
    ('Paris', 'paris', {'ignore_case': False}, 0.0),
    ('It is Paris', 'Paris', {}, 0.0),
    ('hm\nParis', 'Paris', {'extract_how': 'last_line'}, 1.0),
    ('<answer>Paris</answer>', 'Paris', {'extract_how': 'tag'}, 1.0),
    ('Paris', 'Paris', {'extract_how': 'tag'}, 0.0),
    ('Answer: Paris\nbye', 'Paris', {'extract_how': 'marker', 'marker': 'Answer:'}, 1.0),
  ],
)
def test_exact(text, answer, options, expected):
  assert value_of(verifiers.exact(**options), text, make_prompt(answer)) == expected


@pytest.mark.parametrize(
  ('text', 'answer', 'options', 'expected'),
  [
    ('3 - 5 = -2', '-2', {}, 1.0),
    ('3 - 5 = 2', '-2', {}, 0.0),
    ('so 1,000 dollars', '1000', {}, 1.0),
    ('2.50', '2.5', {}, 1.0),
    ('2.4', '2.5', {'tolerance': 0.2}, 1.0),
    ('nothing', '0', {}, 0.0),
    ('#### 18', '18', {'marker': '####'}, 1.0),
    ('18', '18', {'marker': '####'}, 0.0),
  ],
)
def test_number(text, answer, options, expected):
  assert value_of(verifiers.number(**options), text, make_prompt(answer)) == expected


def test_number_cannot_judge_an_answer_that_is_no_number():
  with pytest.raises(RewardError, match="'three' of prompt p/1 is not a number"):
    value_of(verifiers.number(), '3', make_prompt('three'))


@pytest.mark.parametrize(
  ('text', 'pattern', 'full', 'expected'),
  [
    ('a <answer>\n7</answer> b', '<answer>.*</answer>', False, 1.0),
    ('a <answer>7</answer> b', '<answer>.*</answer>', True, 0.0),
    ('7', r'-?\d+', True, 1.0),
  ],
)
def test_format_pattern(text, pattern, full, expected):
  verifier = verifiers.format_pattern(pattern=pattern, full=full)
  assert value_of(verifier, text, make_prompt('')) == expected


def test_format_pattern_bounds_the_text():
  with pytest.raises(RewardError, match='11 characters, more than max_chars=10'):
    verifiers.format_pattern(pattern='x', max_chars=10).task('x' * 11, make_prompt(''))


@pytest.mark.parametrize(
  ('text', 'gold', 'expected'),
  [
    (r'so $\frac{1}{2}$', '0.5', 1.0),
    (r'\boxed{\frac{2}{4}}', r'\frac{1}{2}', 1.0),
    ('The answer is 1/2.', '$1/2$', 1.0),
    (r'\boxed{x^2 + 2x + 1}', '(x+1)^2', 1.0),
    (r'\boxed{x^2}', '(x+1)^2', 0.0),
    ('1234', '1,234', 1.0),
    ('I do not know', '3', 0.0),
    # verify(gold, pred), in this order: an assignment as the prediction is simplified, not as gold
    (r'$x = 5$', '5', 1.0),
  ],
)
def test_math(text, gold, expected):
  pytest.importorskip('math_verify')
  assert value_of(verifiers.math(), text, make_prompt(gold)) == expected


def test_math_cannot_judge_without_mathematics_as_gold():
  pytest.importorskip('math_verify')
  with pytest.raises(RewardError, match='no mathematics'):
    value_of(verifiers.math(), '3', make_prompt(''))


def test_math_reads_the_end_of_a_long_text():
  task = verifiers.math(max_chars=10).task('1' * 100 + '2' * 10, make_prompt('3'))
  assert task.payload == {'gold': '3', 'text': '2' * 10}


def chain_sum_prompt():
  entry = {'question': '1 + 2 =', 'answer': '3', 'metadata': {}}
  return make_prompt('3', task='chain_sum', task_kwargs={}, entry=entry)


@pytest.mark.parametrize(
  ('text', 'options', 'expected'),
  [
    ('3', {}, 1.0),
    ('+03.0', {}, 1.0),
    ('4', {}, 0.0),
    ('so <answer>3</answer>', {'extract_how': 'tag'}, 1.0),
    ('so 3', {'extract_how': 'tag'}, 0.0),
  ],
)
@needs_reasoning_gym
def test_reasoning_gym(text, options, expected):
  assert value_of(verifiers.reasoning_gym(**options), text, chain_sum_prompt()) == expected


def test_reasoning_gym_needs_its_own_prompts():
  with pytest.raises(RewardError, match="lacks \\['task', 'task_kwargs', 'entry'\\]"):
    verifiers.reasoning_gym().task('3', make_prompt('3'))


def test_preload_names_what_pool_processes_import():
  assert verifiers.math().preload == ('math',)
  assert verifiers.reasoning_gym(preload_tasks=('gcd',)).preload == ('reasoning_gym:gcd',)
  assert verifiers.number().preload == ()


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: verifiers.exact(extract_how='boxing'), "extract_how must be one of .*got 'boxing'"),
    (lambda: verifiers.exact(extract_how='marker'), 'give a marker exactly when'),
    (lambda: verifiers.number(tolerance=-1.0), 'tolerance must be finite'),
    (lambda: verifiers.number(tolerance=float('nan')), 'tolerance must be finite'),
    (lambda: verifiers.format_pattern(pattern='('), 'no regular expression'),
  ],
)
def test_options_that_cannot_work(build, message):
  with pytest.raises(ConfigError, match=message):
    build()
