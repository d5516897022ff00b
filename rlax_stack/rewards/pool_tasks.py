"""What a pool process can do: regular expressions, math-verify and reasoning-gym's scorers.

Only `pool_worker` runs these, because each may hang or eat memory on hostile text. Payloads and results are JSON
values. No task evaluates text: scorers that would do so get only answers of a harmless alphabet
(`reasoning_gym_tasks.SAFE_ANSWERS`).
"""

import functools
import json
import re
import time
from collections.abc import Callable
from typing import Any

from rlax_stack.errors import RewardError
from rlax_stack.rewards import reasoning_gym_tasks


def preload(name: str) -> None:
  """Imports what a task kind needs, so that the import does not count against a deadline.

  `name` is 'math', or 'reasoning_gym:TASK'. Raises ImportError, with the cure, when a package is missing.
  """
  kind, _, task = name.partition(':')
  try:
    if kind == 'math':
      _math_score('1', '1')
    elif kind == 'reasoning_gym':
      reasoning_gym_tasks.load_task(task)
  except ModuleNotFoundError as error:
    raise ImportError(f'{error}. Install it: pip install math-verify reasoning-gym.') from error


def regex(payload: dict) -> float:
  """1.0 if `pattern` matches `text` (payload 'full': the whole of it), else 0.0."""
  compiled = re.compile(payload['pattern'], re.DOTALL)
  match = compiled.fullmatch if payload['full'] else compiled.search
  return float(match(payload['text']) is not None)


def regex_steps(payload: dict) -> list[list[float]]:
  """[end, 1.0 or 0.0] for each step between `separator`: whether `pattern` is found in it; blank steps are none."""
  search = re.compile(payload['pattern'], re.DOTALL).search
  separator, steps, end = payload['separator'], [], 0
  for step in payload['text'].split(separator):
    end += len(step)
    if step.strip():
      steps.append([end, float(search(step) is not None)])
    end += len(separator)
  return steps


def math(payload: dict) -> float:
  """1.0 if math-verify finds the answer in `text` equal to `gold`, else 0.0. Raises if gold is no mathematics."""
  return _math_score(payload['gold'], payload['text'])


def _math_score(gold: str, text: str) -> float:
  import math_verify  # slow (sympy), so only where it is used

  # Deadlines are ours (the process is killed); the library's own alarms would hide a hang as a wrong answer.
  predicted = math_verify.parse(text, parsing_timeout=0)
  return float(math_verify.verify(_gold(gold), predicted, timeout_seconds=0, raise_on_error=True))


@functools.lru_cache(maxsize=1024)
def _gold(gold: str) -> list[Any]:
  import math_verify

  marked = any(mark in gold for mark in ('$', '\\boxed', '\\(', '\\['))
  parsed = math_verify.parse(gold if marked else f'${gold}$', parsing_timeout=0)
  if all(isinstance(value, str) for value in parsed):
    raise RewardError(f'the gold answer {gold[:80]!r} is no mathematics that math-verify can parse')
  return parsed


def reasoning_gym(payload: dict) -> float:
  """The score of `answer` (a string or None) under the task's own scorer, as reasoning-gym defines it."""
  task, answer = payload['task'], payload['answer']
  if answer is not None and not reasoning_gym_tasks.is_safe_answer(task, answer):
    answer = None  # such an answer could run as code inside the scorer; it is scored like no answer
  scorer = _scorer(task, json.dumps(payload['task_kwargs'], sort_keys=True))
  return float(scorer(answer, payload['entry']))


@functools.lru_cache(maxsize=128)
def _scorer(task: str, task_kwargs: str) -> Callable[[str | None, dict], float]:
  kwargs = json.loads(task_kwargs)
  return reasoning_gym_tasks.make_dataset(task, seed=0, size=1, task_kwargs=kwargs).score_answer


def probe(payload: dict) -> float:
  """Takes `num_bytes` of memory, waits `seconds` and answers 1.0: shows that the pool's limits hold."""
  taken = bytearray(payload.get('num_bytes', 0))
  time.sleep(payload.get('seconds', 0))
  return float(len(taken) == payload.get('num_bytes', 0))


TASKS: dict[str, Callable[[dict], Any]] = {
  'regex': regex,
  'regex_steps': regex_steps,
  'math': math,
  'reasoning_gym': reasoning_gym,
  'probe': probe,
}
