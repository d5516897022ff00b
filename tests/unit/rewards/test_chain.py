"""Weighted sums, and failures that are never a score of 0."""

import pytest

from rlax_stack.errors import ConfigError, RewardError
from rlax_stack.rewards import pool_tasks
from rlax_stack.rewards.chain import ChainPart, RewardChain, build_chain
from rlax_stack.rewards.verifiers import STEP_VERIFIERS, VERIFIERS, Verifier
from rlax_stack.types import Message, Prompt, Reward


def make_prompt(answer, prompt_id='p'):
  return Prompt(prompt_id=prompt_id, messages=(Message(role='user', content='q'),), answer=answer)


def test_weighted_sum_with_parts_in_order():
  specs = [
    {'name': 'number', 'weight': 1.0},
    {'name': 'format', 'pattern': r'\d+', 'full': True, 'weight': 0.25},
    {'name': 'exact', 'weight': 0, 'label': 'same'},
  ]
  with build_chain(specs, deadline_s=30, num_processes=1) as chain:
    rewards = chain.score(['7', 'it is 7', 'eight'], [make_prompt('7')] * 3)
  assert rewards == [
    Reward(value=1.25, parts={'number': 1.0, 'format': 1.0, 'same': 1.0}),
    Reward(value=1.0, parts={'number': 1.0, 'format': 0.0, 'same': 0.0}),
    Reward(value=0.0, parts={'number': 0.0, 'format': 0.0, 'same': 0.0}),
  ]
  assert chain.num_scored == 3 and not chain.failures


def test_a_mapping_of_labels_does_the_same():
  specs = {'number': {'weight': 2.0}, 'shape': {'name': 'exact', 'weight': 0.5}}
  chain = build_chain(specs)
  assert [part.label for part in chain.parts] == ['number', 'shape']
  assert chain.score(['7'], [make_prompt('7')])[0].value == 2.5


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), float('-inf'), None, 'high'])
def test_a_verdict_that_is_no_finite_number_is_a_failure(bad):
  chain = build_chain(
    [{'name': 'number'}, {'name': 'mine'}], functions={'mine': lambda text, prompt: bad}
  )
  (reward,) = chain.score(['7'], [make_prompt('7')])
  assert reward.value is None
  assert reward.failure == f'mine: the verifier answered {bad!r}, which is no finite number'
  assert reward.parts == {'number': 1.0}
  assert chain.failures == {'mine': 1} and chain.num_scored == 1


def _lines(text, prompt):
  """A pair for each line: where it ends, and its length."""
  ends = [i for i, c in enumerate(text + '|') if c == '|']
  return [[end, float(len(line))] for end, line in zip(ends, text.split('|'), strict=True)]


def test_steps_of_verifiers_add_up_and_are_a_share_of_the_value():
  specs = [
    {'name': 'number', 'weight': 2.0},
    {'name': 'lines', 'weight': 0.5},
    {'name': 'last', 'weight': 10.0},
  ]
  functions = {'lines': _lines, 'last': lambda text, prompt: [(len(text), 0.25)]}
  chain = build_chain(specs, functions=functions)
  (reward,) = chain.score(['abc|7'], [make_prompt('7')])
  assert reward.parts == {'number': 1.0, 'lines': 4.0, 'last': 0.25}
  assert reward.step_ends == (3, 5) and reward.step_values == (1.5, 0.5 + 2.5)
  assert reward.value == 2.0 + 2.0 + 2.5
  (reward,) = build_chain(specs[:1]).score(['7'], [make_prompt('7')])
  assert reward.step_values == () == reward.step_ends


@pytest.mark.parametrize(
  'bad',
  [
    [[3, 1.0], [2, 1.0]],
    [[0, 1.0]],
    [[1, float('nan')]],
    [[1, 1.0, 2.0]],
    [[1.5, 1.0]],
    [1.0],
    [['a', 1]],
  ],
)
def test_steps_that_cannot_be_placed_are_a_failure(bad):
  chain = build_chain([{'name': 'mine'}], functions={'mine': lambda text, prompt: bad})
  (reward,) = chain.score(['7'], [make_prompt('7')])
  assert reward.value is None and 'no finite number' in reward.failure


def test_steps_by_a_pattern_run_in_the_pool():
  spec = {'name': 'step_format', 'pattern': r'\d', 'separator': '\n', 'weight': 0.5}
  with build_chain([spec], deadline_s=30, num_processes=1) as chain:
    first, second, long = chain.score(['a 1\n\nb\n2', ' \n', 'x' * 10**6], [make_prompt('7')] * 3)
  assert first.step_ends == (3, 6, 8) and first.step_values == (0.5, 0.0, 0.5)
  assert first.value == 1.0 and first.parts == {'step_format': 2.0}
  assert second == Reward(value=0.0, parts={'step_format': 0.0})
  payload = {'pattern': 'b', 'separator': '--', 'text': 'ab--c'}
  assert pool_tasks.regex_steps(payload) == [[2, 1.0], [5, 0.0]]
  assert set(STEP_VERIFIERS) <= set(VERIFIERS)
  assert long.value is None and 'characters' in long.failure
  with pytest.raises(ConfigError, match='separator of steps must not be empty'):
    build_chain([spec | {'separator': ''}])
  with pytest.raises(ConfigError, match='no regular expression'):
    build_chain([spec | {'pattern': '('}])


def test_an_exception_fails_its_sample_alone():
  def mine(text, prompt):
    if text == 'bad':
      raise ZeroDivisionError('no')
    return True

  chain = build_chain([{'name': 'mine', 'weight': 2}], functions={'mine': mine})
  first, second = chain.score(['bad', 'good'], [make_prompt('1')] * 2)
  assert first == Reward(value=None, failure='mine: ZeroDivisionError: no')
  assert second == Reward(value=2.0, parts={'mine': 1.0})


def test_a_gold_answer_that_cannot_be_judged_is_a_failure():
  chain = build_chain([{'name': 'number'}])
  (reward,) = chain.score(['3'], [make_prompt('three')])
  assert reward.value is None and "'three' of prompt p is not a number" in reward.failure


def test_a_deadline_is_a_failure_and_the_pool_stays_full():
  specs = [{'name': 'number'}, {'name': 'format', 'pattern': '(a|a)*b', 'full': True}]
  with build_chain(specs, deadline_s=1.0, num_processes=2) as chain:
    chain.start()
    bad, good = chain.score(['a' * 60, 'ab'], [make_prompt('7')] * 2)
    assert bad == Reward(
      value=None, parts={'number': 0.0}, failure='format: deadline of 1 s passed'
    )
    assert good.value == 1.0
    assert chain._pool.num_alive == 2
  assert chain.failures == {'format': 1}
  assert chain._pool.num_alive == 0


@pytest.mark.slow
def test_hostile_mathematics():
  pytest.importorskip('math_verify')
  texts = [
    r'$9^{9^{9^{9^9}}}$',
    r'\boxed{(((10!)!)!)!}',
    r'$\pi.__class__.__mro__$',
    "__import__('os').abort()",
    '{' * 20_000,
    '$' * 20_000,
    r'\boxed{' * 3_000,
    r'so it is $\frac{2}{4}$',
  ]
  with build_chain([{'name': 'math'}], deadline_s=2.0) as chain:
    rewards = chain.score(texts, [make_prompt(r'\frac{1}{2}')] * len(texts))
    assert chain._pool.num_alive == 2
  assert [reward.value for reward in rewards[:2]] == [None, None]
  assert all(reward.value in (None, 0.0) for reward in rewards[2:-1])
  assert rewards[-1].value == 1.0
  assert chain.failures['math'] >= 2


def test_cheap_verifiers_start_no_process():
  chain = build_chain([{'name': 'number'}, {'name': 'exact'}])
  chain.start()
  assert chain._pool is None
  chain.close()


def test_lengths_must_agree():
  with pytest.raises(ValueError, match='1 texts and 2 prompts'):
    build_chain([{'name': 'number'}]).score(['7'], [make_prompt('7')] * 2)


def test_a_chain_of_own_parts():
  part = ChainPart(
    label='length', weight=-1.0, verifier=Verifier(score=lambda text, prompt: len(text))
  )
  assert RewardChain([part]).score(['abc'], [make_prompt('')])[0].value == -3.0


def test_a_pooled_part_needs_a_pool():
  part = ChainPart(
    label='x', weight=1.0, verifier=build_chain([{'name': 'math'}]).parts[0].verifier
  )
  with pytest.raises(RewardError, match='pool'):
    RewardChain([part])


@pytest.mark.parametrize(
  ('specs', 'message'),
  [
    ([], 'different labels'),
    ([{'name': 'number'}, {'name': 'number'}], 'different labels'),
    ([{'name': 'nubmer'}], "no verifier 'nubmer'. The nearest names are: number"),
    ([{'weight': 1.0}], 'no verifier None'),
    ([{'name': 'number', 'tolerence': 1}], "no option 'tolerence'. The nearest are: tolerance"),
    ([{'name': 'format'}], "needs the option 'pattern'"),
    ([{'name': 'number', 'weight': float('nan')}], 'finite number, got nan'),
    ([{'name': 'number', 'weight': '1'}], "finite number, got '1'"),
  ],
)
def test_specs_that_cannot_work(specs, message):
  with pytest.raises(ConfigError, match=message):
    build_chain(specs)


def test_a_deadline_must_be_positive():
  with pytest.raises(ConfigError, match='deadline_s must be above 0'):
    build_chain([{'name': 'number'}], deadline_s=0)
