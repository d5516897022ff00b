"""Verifiers by name: each says how good one text is for one prompt.

Cheap ones (exact, number) run in the calling process; those that can hang or crash (format, math, reasoning_gym) are
turned into tasks for `ProcessPool`. A verifier raises when it cannot judge, for instance on a gold answer that is no
number; the chain counts that and never takes it for a score of 0.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from rlax_stack.errors import ConfigError, RewardError
from rlax_stack.rewards import extract
from rlax_stack.rewards.pool import PoolTask
from rlax_stack.types import Prompt

MATH_CHARS = 20_000  # math-verify sees the end of a text only; its own search is not linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verifier:
  """Exactly one of `score` (runs here, returns a float) and `task` (runs in the pool) is set.

  Either may give a list of [end in the text, reward] pairs instead, one for each step of it. `preload`
  names what pool processes import beforehand.
  """

  score: Callable[[str, Prompt], Any] | None = None
  task: Callable[[str, Prompt], PoolTask] | None = None
  preload: tuple[str, ...] = ()


def exact(
  *, extract_how: str = 'text', marker: str | None = None, ignore_case: bool = True
) -> Verifier:
  """1.0 if the answer part of the text equals the prompt's answer, else 0.0.

  Both are stripped, runs of white space become one blank and one trailing full stop is dropped.

  Args:
    extract_how: 'text', 'last_line', 'boxed', 'tag' or 'marker' (see `extract.extract_answer`).
    marker: for 'marker', the string that the answer follows.
    ignore_case: compare case-folded.
  """
  _check_extraction(extract_how, marker)

  def score(text: str, prompt: Prompt) -> float:
    answer = extract.extract_answer(text, extract_how, marker)
    normalise = functools.partial(_normalise, ignore_case=ignore_case)
    return float(answer is not None and normalise(answer) == normalise(prompt.answer))

  return Verifier(score=score)


def number(*, marker: str | None = None, tolerance: float = 1e-6) -> Verifier:
  r"""1.0 if the number that the text gives as its answer equals the prompt's answer, else 0.0.

  Without a marker that is the last number inside the last `\boxed{}`, else the last number of the text; with one,
  the first number after its last occurrence. `tolerance` is absolute. Raises RewardError where the prompt's
  answer is not a number.
  """
  if not 0 <= tolerance < float('inf'):
    raise ConfigError(
      f'tolerance must be finite and not negative, got {tolerance}. Set it in the reward config.'
    )

  def score(text: str, prompt: Prompt) -> float:
    gold = extract.parse_number(prompt.answer)
    if gold is None:
      raise RewardError(
        f'the answer {prompt.answer[:80]!r} of prompt {prompt.prompt_id} is not a number'
      )
    predicted = extract.answer_number(text, marker)
    return float(predicted is not None and extract.numbers_equal(predicted, gold, tolerance))

  return Verifier(score=score)


def format_pattern(
  *, pattern: str, full: bool = False, max_chars: int = extract.MAX_CHARS
) -> Verifier:
  """1.0 if the regular expression is found in the text, else 0.0; '.' matches newlines.

  It runs in the pool under a deadline, because some patterns take exponential time on some texts.

  Args:
    pattern: in Python's syntax.
    full: the whole text must match.
    max_chars: a longer text is a failure, not a 0.
  """
  _check_pattern(pattern)

  def task(text: str, prompt: Prompt) -> PoolTask:
    _check_length(text, max_chars)
    return PoolTask('regex', {'pattern': pattern, 'full': full, 'text': text})

  return Verifier(task=task)


def step_format(
  *, pattern: str, separator: str = '\n', max_chars: int = extract.MAX_CHARS
) -> Verifier:
  """1.0 for every step of the text in which the regular expression is found, 0.0 for the others.

  A process reward by rule. The steps are what lies between separators, blank ones left out; the score is the number
  of steps that match. Runs in the pool under a deadline.

  Args:
    pattern: in Python's syntax.
    separator: between steps.
    max_chars: a longer text is a failure, not a 0.
  """
  _check_pattern(pattern)
  if not separator:
    raise ConfigError("the separator of steps must not be empty. Set it, such as separator='\\n'.")

  def task(text: str, prompt: Prompt) -> PoolTask:
    _check_length(text, max_chars)
    return PoolTask('regex_steps', {'pattern': pattern, 'separator': separator, 'text': text})

  return Verifier(task=task)


def math(*, max_chars: int = MATH_CHARS) -> Verifier:
  """1.0 if math-verify finds the text's answer equal to the prompt's answer, else 0.0.

  Runs in the pool under a deadline. Only the last `max_chars` characters of the text are read. A prompt's answer
  that is no mathematics is a failure.
  """

  def task(text: str, prompt: Prompt) -> PoolTask:
    return PoolTask('math', {'gold': prompt.answer, 'text': text[-max_chars:]})

  return Verifier(task=task, preload=('math',))


def reasoning_gym(
  *, extract_how: str = 'text', marker: str | None = None, preload_tasks: tuple[str, ...] = ()
) -> Verifier:
  """The score (mostly 0 to 1) that the prompt's own reasoning-gym task gives the answer part of the text.

  Runs in the pool under a deadline, for prompts made by `reasoning_gym_source`: their metadata holds the task and
  the entry.

  Args:
    extract_how: as in `exact`; 'tag' fits prompts that ask for `<answer>` tags.
    marker: for 'marker'.
    preload_tasks: tasks that pool processes import beforehand, outside the deadline.
  """
  _check_extraction(extract_how, marker)

  def task(text: str, prompt: Prompt) -> PoolTask:
    missing = [key for key in ('task', 'task_kwargs', 'entry') if key not in prompt.metadata]
    if missing:
      raise RewardError(
        f'prompt {prompt.prompt_id} is not from reasoning-gym: its metadata lacks {missing}'
      )
    payload = {key: prompt.metadata[key] for key in ('task', 'task_kwargs', 'entry')}
    return PoolTask(
      'reasoning_gym', {**payload, 'answer': extract.extract_answer(text, extract_how, marker)}
    )

  return Verifier(task=task, preload=tuple(f'reasoning_gym:{name}' for name in preload_tasks))


VERIFIERS: dict[str, Callable[..., Verifier]] = {
  'exact': exact,
  'number': number,
  'format': format_pattern,
  'step_format': step_format,
  'math': math,
  'reasoning_gym': reasoning_gym,
}

# Those that give rewards of single steps.
STEP_VERIFIERS = frozenset({'step_format'})


def _normalise(text: str, ignore_case: bool) -> str:
  joined = ' '.join(text.split()).removesuffix('.').rstrip()
  return joined.casefold() if ignore_case else joined


def _check_pattern(pattern: str) -> None:
  try:
    re.compile(pattern)
  except re.error as error:
    raise ConfigError(
      f'the format pattern {pattern!r} is no regular expression: {error}'
    ) from error


def _check_length(text: str, max_chars: int) -> None:
  if len(text) > max_chars:
    raise RewardError(f'the text has {len(text)} characters, more than {max_chars=}')


def _check_extraction(how: Any, marker: str | None) -> None:
  if how not in extract.EXTRACTIONS:
    raise ConfigError(f'extract_how must be one of {sorted(extract.EXTRACTIONS)}, got {how!r}')
  if (how == 'marker') != (marker is not None):
    raise ConfigError(
      f"give a marker exactly when extract_how is 'marker', got {how=} and {marker=}"
    )
