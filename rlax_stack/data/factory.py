"""Prompt sources by name, from config data."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from rlax_stack.data.gsm8k import gsm8k_source
from rlax_stack.data.jsonl import jsonl_source
from rlax_stack.data.procedural import reasoning_gym_source
from rlax_stack.data.source import PromptSource
from rlax_stack.data.split import take_side
from rlax_stack.errors import DataError

SOURCES: dict[str, Callable[..., PromptSource]] = {
  'jsonl': jsonl_source,
  'reasoning_gym': reasoning_gym_source,
  'gsm8k': gsm8k_source,
}


def build_source(
  kind: str,
  *,
  side: str = 'all',
  held_out_every: int = 5,
  salt: str = '',
  limit: int | None = None,
  **options: Any,
) -> PromptSource:
  """A prompt source from config data.

  Args:
    kind: a key of `SOURCES`.
    side: 'all', 'train' or 'held_out': which side of the split by content to keep (see `split`).
    held_out_every: one question in so many is held out.
    salt: another one gives another split.
    limit: at most so many prompts, the first ones of that side.
    options: of the source's function; `path` or `task` among them.

  Raises DataError on an unknown kind or option (with the nearest), and whatever the source raises.
  """
  if kind not in SOURCES:
    raise DataError(
      f'there is no prompt source {kind!r}. The kinds are: {", ".join(sorted(SOURCES))}.'
    )
  parameters = inspect.signature(SOURCES[kind]).parameters
  for option in options:
    if option not in parameters:
      near = difflib.get_close_matches(option, parameters, n=3) or list(parameters)
      raise DataError(
        f'the source {kind!r} has no option {option!r}. The nearest are: {", ".join(near)}.'
      )
  missing = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
  if missing:
    raise DataError(f'the source {kind!r} needs the option {missing[0]!r}, got {sorted(options)}.')
  if limit is not None and limit < 1:
    raise DataError(f'the limit of a source must be at least 1, got {limit}.')
  source = take_side(SOURCES[kind](**options), side, held_out_every=held_out_every, salt=salt)
  return source if limit is None else PromptSource(source.name, source[:limit])
