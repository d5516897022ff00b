"""The template of a teacher's prompt: what it must hold and what it makes of a task."""

import dataclasses
import re

import numpy as np
import pytest

from configs import base
from rlax_stack.config import from_config_dict
from rlax_stack.errors import DataError, PromptTooLongError
from rlax_stack.objective_rules import objective_problems
from rlax_stack.teacher_context import context_limit, teacher_prompt, template_problems
from rlax_stack.types import Message, Prompt

_PROMPT = Prompt(
  prompt_id='p7',
  messages=(
    Message(role='system', content='Be brief.'),
    Message(role='user', content='6 x 7?'),
  ),
  answer='42',
)


class _Characters:
  """A tokenizer of one token per character."""

  def encode_chat(self, messages):
    text = ''.join(f'<{m.role}>{m.content}' for m in messages)
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def _config(**learner):
  config = base.get_config()
  config.objective.advantage = 'teacher'
  for name, value in learner.items():
    config.learner[name] = value
  return from_config_dict(config)


def test_the_last_turn_is_written_anew():
  config = _config(teacher_context='{prompt} It is {answer}.')
  tokens = teacher_prompt(config, _Characters(), _PROMPT)
  assert bytes(tokens.astype(np.uint8)) == b'<system>Be brief.<user>6 x 7? It is 42.'
  assert context_limit(config) == 2 * config.rollout.max_prompt_tokens
  assert context_limit(_config(teacher_context_tokens=9)) == 9


def test_tasks_that_do_not_fit_are_named():
  config = _config(teacher_context='{prompt} It is {answer}.', teacher_context_tokens=20)
  with pytest.raises(PromptTooLongError, match='p7 has 39 tokens .* more than 20'):
    teacher_prompt(config, _Characters(), _PROMPT)
  unanswered = dataclasses.replace(_PROMPT, answer='')
  with pytest.raises(DataError, match='p7 has no answer'):
    teacher_prompt(config, _Characters(), unanswered)
  # Doubled braces are no place for the answer.
  tokens = teacher_prompt(_config(teacher_context='{prompt} {{answer}}'), _Characters(), unanswered)
  assert bytes(tokens.astype(np.uint8)).endswith(b'6 x 7? {answer}')


@pytest.mark.parametrize(
  ('template', 'message'),
  [
    ('It is {answer}.', r'has no place for the task. Write \{prompt\}'),
    ('{prompt} {hint}', "names the field 'hint'. The fields are: answer, prompt"),
    ('{prompt', 'is no template'),
    ('{prompt} {answer!s}', r'plain field names in braces only, got \{answer\}'),
    ('{prompt} {answer:d}', r'plain field names in braces only, got \{answer\}'),
  ],
)
def test_templates_that_cannot_be_filled_are_refused(template, message):
  (problem,) = template_problems(template)
  assert not list(template_problems('{prompt} {answer} {{x}}'))
  assert re.search(message, problem)
  assert problem in list(objective_problems(_config(teacher_context=template)))


def test_a_context_that_nothing_reads_is_refused():
  config = _config(teacher_context='{prompt}')
  assert not list(objective_problems(config))
  plain = dataclasses.replace(config.objective, advantage='group_center()')
  (problem,) = objective_problems(dataclasses.replace(config, objective=plain))
  assert problem.startswith('config.learner.teacher_context={prompt} is scored for boxes')
