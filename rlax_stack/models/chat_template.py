"""Renders chat templates, which are programs from model files, under transformers' conventions.

They run in the sandbox of `template_sandbox.py`. `strftime_now` is left undefined on purpose:
templates then fall back to a fixed date, so that a prompt has the same tokens tomorrow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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


Turn = Message | Mapping[str, Any]


def render_chat(
  template: str,
  messages: Sequence[Turn],
  *,
  add_generation_prompt: bool = True,
  special_tokens: Mapping[str, str],
  tools: Sequence[Mapping[str, Any]] = (),
) -> str:
  """The text that the model's template makes of the messages.

  Args:
    template: Jinja source.
    messages: the turns so far; a mapping reaches the template as it is (role, content, tool_calls ...).
    add_generation_prompt: ends with the opening of the assistant's turn.
    tools: what the model may call, as the template wants it; none leaves the variable undefined.
    special_tokens: further variables, such as bos_token and eos_token.

  Raises:
    ModelFileError: a template that is malformed, refuses the messages, or breaks out of the sandbox
      or of its budget.
  """
  variables: dict[str, Any] = {
    **special_tokens,
    'messages': [_fields(message) for message in messages],
    'add_generation_prompt': add_generation_prompt,
  }
  if tools:
    variables['tools'] = [dict(tool) for tool in tools]
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


def _fields(message: Turn) -> dict[str, Any]:
  if isinstance(message, Message):
    return {'role': message.role, 'content': message.content}
  return dict(message)


def render_plain(messages: Sequence[Turn], *, add_generation_prompt: bool = True) -> str:
  """For a model without a template: one `Role: content` line each, then `Assistant:`."""
  turns = [_fields(message) for message in messages]
  lines = [f'{turn["role"].capitalize()}: {turn["content"]}\n' for turn in turns]
  return ''.join(lines) + ('Assistant:' if add_generation_prompt else '')
