"""What a teacher reads instead of the prompt: its template, filled in for a task. Needs no device."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from rlax_stack.config import RunConfig
from rlax_stack.data.source import check_template, fill_template
from rlax_stack.errors import DataError, PromptTooLongError
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.types import Prompt

_FIELDS = ('prompt', 'answer')
_OPTION = 'config.learner.teacher_context'


def template_problems(template: str) -> Iterator[str]:
  """What is wrong with config.learner.teacher_context."""
  try:
    names = check_template(template, _FIELDS, _OPTION)
  except DataError as error:
    yield str(error)
    return
  if 'prompt' not in names:
    yield f'{_OPTION}={template!r} has no place for the task. Write {{prompt}} where it goes.'


def context_limit(config: RunConfig) -> int:
  """Tokens of such a context at most."""
  return config.learner.teacher_context_tokens or 2 * config.rollout.max_prompt_tokens


def teacher_prompt(config: RunConfig, tokenizer: Tokenizer, prompt: Prompt) -> np.ndarray:
  """The prompt as the teacher has it, int32 [P]: the last turn by the template, what is before it as it is.

  Raises:
    DataError: no answer where the template has a place for it, or no template.
    PromptTooLongError: more tokens than `context_limit`.
  """
  template, last = config.learner.teacher_context, prompt.messages[-1]
  if 'answer' in check_template(template, _FIELDS, _OPTION) and not prompt.answer:
    raise DataError(
      f'prompt {prompt.prompt_id} has no answer for the place of {_OPTION}={template!r}. Set '
      'config.data.train.answer_field, or leave {answer} out.'
    )
  text = fill_template(template, {'prompt': last.content, 'answer': prompt.answer})
  tokens = tokenizer.encode_chat([*prompt.messages[:-1], dataclasses.replace(last, content=text)])
  limit = context_limit(config)
  if len(tokens) > limit:
    raise PromptTooLongError(
      f'prompt {prompt.prompt_id} has {len(tokens)} tokens in config.learner.teacher_context, more than {limit}. Raise '
      'config.learner.teacher_context_tokens, or drop that prompt.'
    )
  return tokens
