"""A verifier beside the solver: what it is asked, what its words say, and what both get."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.errors import ConfigError, PromptTooLongError
from rlax_stack.rollout.requests import FinishedSample
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.verdicts import Verdicts, check_template
from rlax_stack.types import FinishReason, Message, Prompt, Reward, SamplingParams


class Letters:
  """A token for every character of the one turn."""

  def encode_chat(self, messages):
    (message,) = messages
    return np.array([ord(letter) % 97 for letter in message.content], np.int32)


VERDICTS = Verdicts(
  group_size=3,
  answers=2,
  verdicts=2,
  policy='judge',
  tokenizer=Letters(),
  sampling=SamplingParams(max_tokens=5, seed=1),
  max_prompt_tokens=40,
  template='Q {question} A {answer}',
  words=('correct', 'incorrect'),
  label='exact',
  correct_at=1.0,
  weight=0.5,
)


def answered(request, tokens):
  tokens = np.array(tokens, np.int32)
  return FinishedSample(
    request=request,
    tokens=tokens,
    log_probs_t=np.full(len(tokens), -1.0, np.float32),
    raw_log_probs_t=np.full(len(tokens), -2.0, np.float32),
    version_t=np.zeros(len(tokens), np.int32),
    finish_reason=FinishReason.STOP,
  )


def test_answers_come_first_and_the_first_of_them_are_judged(make_task):
  task = make_task(group=5, size=VERDICTS.num_samples)
  plan = VERDICTS.plan(task)
  requests = plan.start()
  assert [r.sample_index for r in requests] == [0, 1, 2] and {r.policy for r in requests} == {''}
  further, (third,) = plan.take(answered(requests[2], [9]))
  assert not further and (third.sample_index, third.role, third.asked) == (2, '', None)
  further, (second,) = plan.take(answered(requests[1], [8, 9]))
  assert second.role == '' and [r.sample_index for r in further] == [5, 6]
  for request in further:
    assert (request.group_id, request.policy) == (5, 'judge')
    assert request.sampling == VERDICTS.sampling
    np.testing.assert_array_equal(
      request.prompt_tokens, Letters().encode_chat([Message(role='user', content='Q ? A 8 9 ')])
    )
  none, (verdict,) = plan.take(answered(further[1], [4]))
  assert not none and (verdict.role, verdict.sample_index) == ('verifier', 6)
  assert verdict.asked.messages[0].content == 'Q ? A 8 9 '
  assert verdict.prompt_id == verdict.asked.prompt_id == 'p5/verifier/1'
  assert verdict.mask_t.sum() == 1 and len(verdict.tokens) == len(further[1].prompt_tokens) + 1
  assert isinstance(VERDICTS.for_evaluation, Independent)
  assert VERDICTS.limits(7) == Independent().limits(7)
  assert list(VERDICTS.problems(3)) == [] and 'answers=2' in next(VERDICTS.problems(1))


def test_an_answer_that_is_too_long_loses_its_beginning():
  prompt = Prompt(prompt_id='p', messages=(Message(role='user', content='1+1'),), answer='2')
  asked, tokens = VERDICTS.fitting(prompt, 0, 'x' * 90 + ' so 2')
  assert len(tokens) == 40 and asked.messages[0].content.endswith('x so 2')
  whole, _ = VERDICTS.fitting(prompt, 0, 'so 2')
  assert whole == VERDICTS.asked(prompt, 0, 'so 2')
  assert whole.metadata == {'role': 'verifier'} and whole.answer == '2'
  long = dataclasses.replace(prompt, messages=(Message(role='user', content='1' * 50),))
  with pytest.raises(PromptTooLongError, match='prompt p has 55 tokens in the verifier'):
    VERDICTS.fitting(long, 0, 'so 2')


@pytest.mark.parametrize(
  ('text', 'says'),
  [
    ('correct', True),
    ('It is INCORRECT.', False),
    ('correct? no: incorrect', False),
    ('not incorrect but correct!', True),
    ('correctness', None),
    ('', None),
  ],
)
def test_the_last_of_the_two_words_is_the_verdict(text, says):
  assert VERDICTS.verdict(text) is says


def test_the_verifier_gets_agreement_and_the_solver_what_verdicts_add():
  prompt = Prompt(prompt_id='p', messages=(), answer='2')

  def rule(texts, prompts):
    assert len(texts) == len(prompts) == 3
    values = {'right': 1.0, 'wrong': 0.0, 'broken': None}
    return [
      Reward(value=values[t], parts={} if t == 'broken' else {'exact': values[t]}, failure='x')
      for t in texts
    ]

  score = VERDICTS.scorer(rule)
  texts = ['right', 'wrong', 'right', 'correct', 'hm', 'incorrect', 'correct']
  got = score(texts, [prompt] * 7)
  assert [r.value for r in got] == [1.0 + 0.5 * 0.5, 0.0 + 0.5 * 0.5, 1.0, 1.0, 0.0, 1.0, 0.0]
  assert [r.parts['verifier'] for r in got[:2]] == [0.5, 0.5] and 'verifier' not in got[2].parts
  assert [r.parts['verdict'] for r in got[3:]] == [1.0, 0.0, 1.0, 1.0]
  assert [r.parts['answer_correct'] for r in got[3:]] == [1.0, 1.0, 0.0, 0.0]
  failed = score(['broken', *texts[1:]], [prompt] * 7)
  assert [r.value for r in failed] == [None, 0.25, 1.0, None, None, 1.0, 0.0]
  assert failed[3].failure == 'the rule failed: x'
  with pytest.raises(ValueError, match='7 samples here, got 3'):
    score(texts[:3], [prompt] * 3)


def test_templates_have_two_fields():
  check_template('{{x}} {question} {answer} {answer}')
  with pytest.raises(ConfigError, match='nothing else in braces'):
    check_template('{question} {answer} {0}')
