"""JSON-lines files: what they become, and how they are refused."""

import pytest

from rlax_stack.data import jsonl
from rlax_stack.errors import DataError
from rlax_stack.types import Message


def write(tmp_path, text):
  path = tmp_path / 'tasks.jsonl'
  path.write_text(text, encoding='utf-8')
  return str(path)


def test_records_become_prompts(tmp_path):
  path = write(
    tmp_path, '{"q": "Wie viel?", "a": 5, "level": 2}\n\n{"q": "é", "a": "x", "level": null}\n'
  )
  source = jsonl.jsonl_source(
    path,
    prompt_template='{q} ({a})',
    answer_field='a',
    system_prompt='Be brief.',
    metadata_fields=('level',),
  )
  assert [prompt.prompt_id for prompt in source] == ['tasks/1', 'tasks/3']
  assert [prompt.answer for prompt in source] == ['5', 'x']
  assert source[0].messages == (
    Message(role='system', content='Be brief.'),
    Message(role='user', content='Wie viel? (5)'),
  )
  assert [dict(prompt.metadata) for prompt in source] == [
    {'question': 'Wie viel? (5)', 'level': 2},
    {'question': 'é (x)', 'level': None},
  ]


def test_the_answer_may_be_a_template(tmp_path):
  path = write(tmp_path, '{"question": "q", "value": 5, "unit": "m"}')
  assert jsonl.jsonl_source(path, answer_field='{value} {unit}')[0].answer == '5 m'


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'is empty. Write one JSON object per line'),
    (' \n\n', 'is empty'),
    ('{"question": "q", "answer": "a"}\n{"question": \n', 'line 2: no JSON'),
    ('[1]\n', 'line 1: a JSON object is needed, got list'),
    ('[' * 100_000, 'line 1: no JSON'),
    (
      '{"qestion": "q", "answer": "a"}\n',
      "line 1: there is no field 'question'.*Did you mean 'qestion'",
    ),
    ('{"question": "q"}\n', "line 1: there is no field 'answer', only \\['question'\\]"),
    ('{"question": "q", "answer": null}\n', "line 1: the field 'answer' is null"),
  ],
)
def test_files_that_are_refused(tmp_path, text, message):
  with pytest.raises(DataError, match=message):
    jsonl.jsonl_source(write(tmp_path, text))


def test_bytes_that_are_no_text_are_refused(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_bytes(b'{"question": "\xff\xfe"}\n')
  with pytest.raises(DataError, match='line 1: no JSON'):
    jsonl.jsonl_source(str(path))


def test_paths_that_are_no_files(tmp_path):
  with pytest.raises(DataError, match='nowhere.jsonl does not exist'):
    jsonl.jsonl_source(str(tmp_path / 'nowhere.jsonl'))
  with pytest.raises(DataError, match='is a directory'):
    jsonl.jsonl_source(str(tmp_path))


def test_read_records_and_field_text(tmp_path):
  path = write(tmp_path, '\n{"a": [1, "é"]}\n')
  ((number, record),) = jsonl.read_records(path)
  assert (number, record) == (2, {'a': [1, 'é']})
  assert jsonl.field_text(record, 'a', path, number) == '[1, "é"]'
