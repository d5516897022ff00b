"""What a teacher reads instead of the prompt: its template, filled in for a task. Needs no device."""

import dataclasses
import string
from collections.abc import Iterator

import numpy as np

from rlax_stack.config import RunConfig
from rlax_stack.errors import DataError, PromptTooLongError
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.types import Prompt

_FIELDS = {'prompt', 'answer'}


def template_problems(template: str) -> Iterator[str]:
  """What is wrong with config.learner.teacher_context."""
  try:
    fields = {field for _, field, *_ in string.Formatter().parse(template) if field is not None}
  except ValueError as error:
    yield f'config.learner.teacher_context cannot be read: {error}. Write {{{{ for a brace.'
    return
  if 'prompt' not in fields or fields - _FIELDS:
    yield (
      'config.learner.teacher_context needs {prompt} and may have {answer}, and nothing else in braces, got '
      f'{sorted(fields)}.'
    )


def context_limit(config: RunConfig) -> int:
  """Tokens of such a context at most."""
  return config.learner.teacher_context_tokens or 2 * config.rollout.max_prompt_tokens


def teacher_prompt(config: RunConfig, tokenizer: Tokenizer, prompt: Prompt) -> np.ndarray:
  """The prompt as the teacher has it, int32 [P]: the last turn by the template, what is before it as it is.

  Raises:
    DataError: no answer where the template has a place for it.
    PromptTooLongError: more tokens than `context_limit`.
  """
  template, last = config.learner.teacher_context, prompt.messages[-1]
  if '{answer}' in template and not prompt.answer:
    raise DataError(
      f'prompt {prompt.prompt_id} has no answer for the place of config.learner.teacher_context={template!r}. Set '
      'config.data.train.answer_field, or leave {answer} out.'
    )
  text = template.format(prompt=last.content, answer=prompt.answer)
  tokens = tokenizer.encode_chat([*prompt.messages[:-1], dataclasses.replace(last, content=text)])
  limit = context_limit(config)
  if len(tokens) > limit:
    raise PromptTooLongError(
      f'prompt {prompt.prompt_id} has {len(tokens)} tokens in config.learner.teacher_context, more than {limit}. Raise '
      'config.learner.teacher_context_tokens, or drop that prompt.'
    )
  return tokens
