"""Renders chat templates, which are programs from model files, under transformers' conventions.

They run in the sandbox of `template_sandbox.py`. `strftime_now` is left undefined on purpose:
templates then fall back to a fixed date, so that a prompt has the same tokens tomorrow.
"""

from collections.abc import Mapping, Sequence

import jinja2

from rlax_stack.errors import ModelFileError
from rlax_stack.models.template_sandbox import render
from rlax_stack.types import Message

_FAULTS = (
  ArithmeticError,
  AttributeError,
  LookupError,
  MemoryError,
  RecursionError,
  SyntaxError,
  TypeError,
  ValueError,
)


def render_chat(
  template: str,
  messages: Sequence[Message],
  *,
  add_generation_prompt: bool = True,
  special_tokens: Mapping[str, str],
) -> str:
  """The text that the model's template makes of the messages.

  Args:
    template: Jinja source.
    messages: the turns so far.
    add_generation_prompt: ends with the opening of the assistant's turn.
    special_tokens: further variables, such as bos_token and eos_token.

  Raises:
    ModelFileError: a template that is malformed, refuses the messages, or breaks out of the sandbox
      or of its budget.
  """
  turns = [{'role': message.role, 'content': message.content} for message in messages]
  variables = {
    **special_tokens,
    'messages': turns,
    'add_generation_prompt': add_generation_prompt,
  }
  try:
    return render(template, variables)
  except jinja2.TemplateError as error:
    raise ModelFileError(
      f'chat template: {str(error)[:500]} Use other messages, or a model with another template.'
    ) from error
  except _FAULTS as error:  # a template is a program: what it runs into is its own fault
    raise ModelFileError(
      f'chat template: {type(error).__name__}: {str(error)[:200]}. '
      'Use a model with another template.'
    ) from error


def render_plain(messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
  """For a model without a template: one `Role: content` line each, then `Assistant:`."""
  lines = [f'{message.role.capitalize()}: {message.content}\n' for message in messages]
  return ''.join(lines) + ('Assistant:' if add_generation_prompt else '')
