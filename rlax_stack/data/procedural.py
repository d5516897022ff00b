"""Prompts from reasoning-gym's procedural tasks.

Invariant: a source holds distinct questions, and a prompt is a function of (task, options, seed, index) alone. What
the task's own scorer needs travels in the prompt's metadata.
"""

import json
from collections.abc import Mapping
from typing import Any

from rlax_stack.data.source import (
  PromptSource,
  check_template,
  content_hash,
  fill_template,
  make_messages,
)
from rlax_stack.errors import DataError
from rlax_stack.rewards.reasoning_gym_tasks import make_dataset
from rlax_stack.types import Prompt


def reasoning_gym_source(
  task: str,
  *,
  size: int = 500,
  seed: int = 0,
  task_kwargs: Mapping[str, Any] | None = None,
  prompt_template: str = '{question}',
  system_prompt: str | None = None,
) -> PromptSource:
  """The distinct questions among `size` draws of a reasoning-gym task, in the order drawn.

  `prompt_id` is the task and a hash of the question, so the same problem has the same id under another size or seed.
  `metadata` holds question, task, task_kwargs and the whole entry.

  Args:
    task: reasoning-gym's name, e.g. 'chain_sum'.
    size: draws; small tasks repeat themselves (one-digit sums of two terms: 200 distinct problems), so the source may
      be shorter.
    seed: of the draws.
    task_kwargs: the task's own options, e.g. {'min_terms': 2}.
    prompt_template: the user's turn; its only field is `question`.
    system_prompt: the system's turn, if any.

  Raises DataError on an unknown task (with the nearest names), options that it refuses, or size below 1.
  """
  if size < 1:
    raise DataError(f'a reasoning-gym source needs size of at least 1, got {size=}.')
  check_template(prompt_template, ('question',), 'prompt_template')
  kwargs = dict(task_kwargs or {})
  try:
    dataset = make_dataset(task, seed=seed, size=size, task_kwargs=kwargs)
  except ModuleNotFoundError as error:
    raise DataError(f'reasoning-gym tasks need a package: {error}.') from error
  prompts: dict[str, Prompt] = {}
  for index in range(size):
    entry = _plain(dataset, dataset[index], task, check_score=index == 0)
    key = content_hash(entry['question'])
    if key not in prompts:
      user = fill_template(prompt_template, {'question': entry['question']})
      prompts[key] = Prompt(
        prompt_id=f'{task}/{key[:16]}',
        messages=make_messages(user, system_prompt),
        answer='' if entry['answer'] is None else str(entry['answer']),
        metadata={
          'question': entry['question'],
          'task': task,
          'task_kwargs': kwargs,
          'entry': entry,
        },
      )
  return PromptSource(task, list(prompts.values()))


def _plain(dataset: Any, entry: dict[str, Any], task: str, check_score: bool) -> dict[str, Any]:
  """The entry as JSON values, as it will reach the scorer. An answer of None (the scorer alone decides) becomes ''.

  `check_score` makes sure that the scorer takes it like the original: some scorers insist on tuples.
  """
  try:
    plain = json.loads(json.dumps(entry))
    answer = entry['answer']
    same = not check_score or dataset.score_answer(answer, plain) == dataset.score_answer(
      answer, entry
    )
  except (TypeError, ValueError, KeyError) as error:
    raise DataError(
      f'the reasoning-gym task {task!r} does not survive JSON: {error}. Choose another task.'
    ) from error
  if not same:
    raise DataError(
      f'the scorer of the reasoning-gym task {task!r} does not survive JSON. Choose another task.'
    )
  return plain
