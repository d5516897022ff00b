"""Keeping held-out problems out of training, by content.

Invariant: of two prompts that ask the same, both are on the same side, whatever source, seed, template or size they
come from; so a held-out problem never occurs in training.
"""

import hashlib
from collections.abc import Iterable

from rlax_stack.data.source import PromptSource, question_key
from rlax_stack.errors import DataError
from rlax_stack.types import Prompt

SIDES = ('all', 'train', 'held_out')


def is_held_out(prompt: Prompt, *, held_out_every: int, salt: str = '') -> bool:
  """Whether a problem is held out: true for about one question in `held_out_every`, decided by its content.

  Raises DataError if `held_out_every` is below 2.
  """
  if held_out_every < 2:
    raise DataError(f'held_out_every must be at least 2 (half is held out), got {held_out_every}.')
  digest = hashlib.sha256(f'{salt}\n{question_key(prompt)}'.encode()).digest()
  return int.from_bytes(digest[:8], 'big') % held_out_every == 0


def take_side(
  source: PromptSource, side: str, *, held_out_every: int = 5, salt: str = ''
) -> PromptSource:
  """The 'train' or the 'held_out' prompts of a source (or 'all'), in its order. Raises DataError if none is left."""
  if side not in SIDES:
    raise DataError(f'a side is one of {", ".join(SIDES)}, got {side!r}.')
  if side == 'all':
    return source
  wanted = side == 'held_out'
  chosen = [p for p in source if is_held_out(p, held_out_every=held_out_every, salt=salt) == wanted]
  return PromptSource(f'{source.name} ({side})', chosen)


def split_by_content(
  source: PromptSource, *, held_out_every: int = 5, salt: str = ''
) -> tuple[PromptSource, PromptSource]:
  """(train, held_out), disjoint by content. Another `salt` gives another split."""
  train = take_side(source, 'train', held_out_every=held_out_every, salt=salt)
  return train, take_side(source, 'held_out', held_out_every=held_out_every, salt=salt)


def exclude(source: PromptSource, held_out: Iterable[Prompt]) -> PromptSource:
  """The source without the problems that occur in `held_out`, in its order. Raises DataError if none is left."""
  keys = {question_key(prompt) for prompt in held_out}
  kept = [prompt for prompt in source if question_key(prompt) not in keys]
  if not kept:
    raise DataError(
      f'all {len(source)} problems of {source.name} are held out, so none is left to train on. Hold out fewer '
      '(config.data.eval.size), train on a larger task or another seed, or set config.data.exclude_eval=False.'
    )
  return PromptSource(source.name, kept)
