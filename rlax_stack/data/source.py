"""A prompt source: a named, random-access, immutable sequence of prompts.

Invariant: within a source every `prompt_id` is unique, and it depends on the data alone, so that it is the same in
every epoch and after every restart. Sources hold their prompts in memory; none has a worker process.
"""

import collections
import difflib
import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from rlax_stack.errors import DataError
from rlax_stack.types import Message, Prompt


class PromptSource(Sequence[Prompt]):
  """Prompts under a name. Raises DataError if there are none or two share a `prompt_id`."""

  def __init__(self, name: str, prompts: Sequence[Prompt]):
    self.name = name
    self._prompts = tuple(prompts)
    if not self._prompts:
      raise DataError(f'the prompt source {name} is empty. Give it at least one problem.')
    id_, count = collections.Counter(prompt.prompt_id for prompt in self._prompts).most_common(1)[0]
    if count > 1:
      raise DataError(
        f'the prompt source {name} has {count} prompts with the id {id_!r}; ids must be unique.'
      )

  def __len__(self) -> int:
    return len(self._prompts)

  def __getitem__(self, index):
    """The prompt at an index (negative ones count from the end), or a tuple of prompts for a slice."""
    return self._prompts[index]

  def fingerprint(self) -> str:
    """SHA-256 over all ids in order: two sources with the same one give the same prompts in the same order."""
    digest = hashlib.sha256()
    for prompt in self._prompts:
      digest.update(json.dumps(prompt.prompt_id).encode())
    return digest.hexdigest()


def make_messages(user: str, system_prompt: str | None) -> tuple[Message, ...]:
  """A user turn, after a system turn if there is a system prompt."""
  system = (Message(role='system', content=system_prompt),) if system_prompt else ()
  return (*system, Message(role='user', content=user))


def check_template(template: str, fields: Sequence[str] | None, option: str) -> tuple[str, ...]:
  """The field names that a template uses, in order of first use.

  Args:
    template: text with `{field}` in it; literal braces are doubled. Only plain names are allowed.
    fields: the names that exist, or None if that is not known yet.
    option: the config option, for the message.

  Raises DataError on unbalanced braces, empty or composed fields and unknown names.
  """
  try:
    parsed = [
      (name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(template)
    ]
  except ValueError as error:
    raise DataError(
      f'{option}={template!r} is no template: {error}. Double literal braces: {{{{ }}}}.'
    ) from error
  names: dict[str, None] = {}
  for name, spec, conversion in parsed:
    if name is None:
      continue
    if not name.isidentifier() or spec or conversion:
      raise DataError(
        f'{option}={template!r} may hold plain field names in braces only, got {{{name}}}. Double literal braces: '
        '{{ }}.'
      )
    if fields is not None and name not in fields:
      near = difflib.get_close_matches(name, fields, n=3) or sorted(fields)
      raise DataError(
        f'{option}={template!r} names the field {name!r}. The fields are: {", ".join(near)}.'
      )
    names[name] = None
  return tuple(names)


def fill_template(template: str, values: Mapping[str, str]) -> str:
  """The template with its fields replaced; values are inserted as they are. Check the template first."""
  return string.Formatter().vformat(template, (), values)


def question_key(prompt: Prompt) -> str:
  """SHA-256 (hexadecimal) of what is asked, equal for the same problem in another template or source.

  The question is `metadata['question']`, else the last message; white space and case do not count.
  """
  question: Any = prompt.metadata.get('question') or prompt.messages[-1].content
  return content_hash(str(question))


def content_hash(text: str) -> str:
  """SHA-256 (hexadecimal) of a text up to white space and case."""
  return hashlib.sha256(' '.join(text.split()).casefold().encode()).hexdigest()
