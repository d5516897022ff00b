"""Prompt sources by name, from config data."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from rlax_stack.config import DataSection, SourceSection
from rlax_stack.data.gsm8k import gsm8k_source
from rlax_stack.data.jsonl import jsonl_source
from rlax_stack.data.procedural import reasoning_gym_source
from rlax_stack.data.source import PromptSource
from rlax_stack.data.split import exclude, take_side
from rlax_stack.errors import DataError

SOURCES: dict[str, Callable[..., PromptSource]] = {
  'jsonl': jsonl_source,
  'reasoning_gym': reasoning_gym_source,
  'gsm8k': gsm8k_source,
}
# Fields of the config that each kind reads; the others have no meaning for it.
_READS = {
  'jsonl': ('path', 'prompt_template', 'answer_field', 'system_prompt'),
  'gsm8k': ('path', 'split', 'prompt_template', 'system_prompt'),
  'reasoning_gym': ('task', 'task_options', 'size', 'seed', 'prompt_template', 'system_prompt'),
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


def train_and_eval_sources(section: DataSection) -> tuple[PromptSource, PromptSource]:
  """(train, eval) of `config.data`. With `exclude_eval`, no problem of eval occurs in train, compared by content.

  Raises DataError if nothing is left to train on.
  """
  train, held_out = source_from_section(section.train), source_from_section(section.eval)
  return (exclude(train, held_out) if section.exclude_eval else train), held_out


def source_from_section(section: SourceSection) -> PromptSource:
  """The source that one section of the config describes. For files a `size` above 0 takes the first so many."""
  options = {name: getattr(section, name) for name in _READS.get(section.kind, ())}
  limit = None if 'size' in options or section.size == 0 else section.size
  return build_source(section.kind, limit=limit, **options)
