"""Prompts from a file with one JSON object a line.

Invariant: a file either becomes a source whole or is refused with the first line that is wrong; no line is skipped
silently (blank lines aside).
"""

import difflib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from rlax_stack.data.source import PromptSource, check_template, fill_template, make_messages
from rlax_stack.errors import DataError
from rlax_stack.types import Prompt


def jsonl_source(
  path: str,
  *,
  prompt_template: str = '{question}',
  answer_field: str = 'answer',
  system_prompt: str | None = None,
  metadata_fields: tuple[str, ...] = (),
) -> PromptSource:
  """Prompts from a JSON-lines file, in the order of the file.

  `prompt_id` is the file's stem and the line number, e.g. 'train/17'. `metadata['question']` is the filled
  prompt template, which separates training from held-out problems by content.

  Args:
    path: file in UTF-8, one JSON object per line.
    prompt_template: the user's turn, with the object's fields in braces; literal braces are doubled.
    answer_field: name of the field that the verifiers compare with, or a template over fields.
    system_prompt: the system's turn, if any.
    metadata_fields: fields that are copied into the prompt's metadata.

  Raises DataError if the file is missing, empty or has a line that is no JSON object or lacks a field.
  """
  asked = check_template(prompt_template, None, 'prompt_template')
  answer_template = answer_field if '{' in answer_field else f'{{{answer_field}}}'
  answered = check_template(answer_template, None, 'answer_field')
  stem = pathlib.Path(path).stem
  prompts = []
  for number, record in read_records(path):
    values = {name: field_text(record, name, path, number) for name in (*asked, *answered)}
    kept = {name: _field(record, name, path, number) for name in metadata_fields}
    question = fill_template(prompt_template, values)
    prompts.append(
      Prompt(
        prompt_id=f'{stem}/{number}',
        messages=make_messages(question, system_prompt),
        answer=fill_template(answer_template, values),
        metadata={'question': question, **kept},
      )
    )
  return PromptSource(stem, prompts)


def read_records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
  """(line number from 1, object) of each line that is not blank.

  Raises DataError, with path and line number, as soon as a line is no JSON object.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    what = 'is a directory' if file.is_dir() else 'does not exist'
    raise DataError(f'the prompt file {path} {what}. Set the path of a JSON-lines file.')
  empty = True
  with file.open('rb') as lines:
    for number, line in enumerate(lines, start=1):
      if line.strip():
        empty = False
        yield number, _parse(line, path, number)
  if empty:
    raise DataError(f'the prompt file {path} is empty. Write one JSON object per line into it.')


def field_text(record: dict[str, Any], name: str, path: str, number: int) -> str:
  """A field as text: strings as they are, numbers, lists and objects as JSON. Raises DataError if missing or null."""
  value = _field(record, name, path, number)
  if value is None:
    raise DataError(
      f'{path}, line {number}: the field {name!r} is null. Give it a value or remove the line.'
    )
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _field(record: dict[str, Any], name: str, path: str, number: int) -> Any:
  if name not in record:
    near = difflib.get_close_matches(name, record, n=1)
    hint = f' Did you mean {near[0]!r}?' if near else ''
    raise DataError(
      f'{path}, line {number}: there is no field {name!r}, only {sorted(record)}.{hint}'
    )
  return record[name]


def _parse(line: bytes, path: str, number: int) -> dict[str, Any]:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise DataError(
      f'{path}, line {number}: no JSON ({error}). Each line must be one JSON object.'
    ) from error
  if not isinstance(record, dict):
    raise DataError(f'{path}, line {number}: a JSON object is needed, got {type(record).__name__}.')
  return record
