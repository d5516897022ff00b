"""GSM8K (grade-school word problems) from a path: a directory with train.jsonl and test.jsonl, or one such file."""

import pathlib

from rlax_stack.data.jsonl import field_text, read_records
from rlax_stack.data.source import PromptSource, check_template, fill_template, make_messages
from rlax_stack.errors import DataError
from rlax_stack.types import Prompt

SUBSETS = ('train', 'test')


def gsm8k_source(
  path: str,
  *,
  subset: str = 'train',
  prompt_template: str = '{question}',
  system_prompt: str | None = None,
) -> PromptSource:
  """GSM8K problems; the answer is the number after '####', without commas.

  `prompt_id` is 'gsm8k/FILE/LINE'; `metadata` holds the question and the solution's text.

  Args:
    path: directory or file.
    subset: 'train' or 'test', which file of a directory to take.
    prompt_template: the user's turn; its only field is `question`.
    system_prompt: the system's turn, if any.

  Raises DataError if there is no such file, or a line lacks the fields or the '####'.
  """
  if subset not in SUBSETS:
    raise DataError(f'GSM8K has the subsets {", ".join(SUBSETS)}, got {subset=}.')
  check_template(prompt_template, ('question',), 'prompt_template')
  file = pathlib.Path(path)
  if file.is_dir():
    file = file / f'{subset}.jsonl'
  if not file.is_file():
    raise DataError(
      f'there is no GSM8K at {file}. Set the path of a directory with train.jsonl and test.jsonl.'
    )
  prompts = []
  for number, record in read_records(str(file)):
    question = field_text(record, 'question', str(file), number)
    solution, marker, answer = field_text(record, 'answer', str(file), number).rpartition('####')
    if not marker:
      raise DataError(f"{file}, line {number}: the answer has no '####' before its final number.")
    prompts.append(
      Prompt(
        prompt_id=f'gsm8k/{file.stem}/{number}',
        messages=make_messages(
          fill_template(prompt_template, {'question': question}), system_prompt
        ),
        answer=answer.strip().replace(',', ''),
        metadata={'question': question, 'solution': solution.strip()},
      )
    )
  return PromptSource(f'gsm8k/{file.stem}', prompts)
