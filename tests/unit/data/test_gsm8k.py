"""GSM8K from files, and from the real data where it lies beside the repository."""

import json
import pathlib

import pytest

from rlax_stack.data.gsm8k import gsm8k_source
from rlax_stack.data.split import exclude
from rlax_stack.errors import DataError

_REAL = pathlib.Path(__file__).resolve().parents[4] / 'shared' / 'data' / 'gsm8k'


def write(path, *answers):
  lines = [json.dumps({'question': f'Q{i}?', 'answer': answer}) for i, answer in enumerate(answers)]
  path.write_text('\n'.join(lines))


def test_directory_and_file(tmp_path):
  write(tmp_path / 'train.jsonl', 'So <<1+1=2>>2.\n#### 2', '#### -1,234')
  write(tmp_path / 'test.jsonl', 'x\n#### 7')
  train = gsm8k_source(str(tmp_path), prompt_template='Solve: {question}', system_prompt='s')
  assert [(p.prompt_id, p.answer) for p in train] == [
    ('gsm8k/train/1', '2'),
    ('gsm8k/train/2', '-1234'),
  ]
  assert [message.content for message in train[0].messages] == ['s', 'Solve: Q0?']
  assert dict(train[0].metadata) == {'question': 'Q0?', 'solution': 'So <<1+1=2>>2.'}
  held_out = gsm8k_source(str(tmp_path), subset='test')
  assert [(p.prompt_id, p.answer) for p in held_out] == [('gsm8k/test/1', '7')]
  assert [p.prompt_id for p in gsm8k_source(str(tmp_path / 'test.jsonl'))] == ['gsm8k/test/1']


def test_what_is_refused(tmp_path):
  with pytest.raises(DataError, match='no GSM8K at .*train.jsonl. Set the path of a directory'):
    gsm8k_source(str(tmp_path))
  with pytest.raises(DataError, match="subsets train, test, got subset='dev'"):
    gsm8k_source(str(tmp_path), subset='dev')
  write(tmp_path / 'train.jsonl', '#### 1', 'no marker')
  with pytest.raises(DataError, match="train.jsonl, line 2: the answer has no '####'"):
    gsm8k_source(str(tmp_path))
  with pytest.raises(DataError, match="names the field 'answer'"):
    gsm8k_source(str(tmp_path), prompt_template='{answer}')


@pytest.mark.skipif(not _REAL.is_dir(), reason='GSM8K does not lie beside the repository')
def test_the_real_data():
  train = gsm8k_source(str(_REAL))
  held_out = gsm8k_source(str(_REAL), subset='test')
  assert (len(train), len(held_out)) == (7473, 1319)
  assert held_out[0].answer == '18' and train[0].answer == '72'
  assert all(
    prompt.answer.lstrip('-').replace('.', '', 1).isdigit() for prompt in (*train, *held_out)
  )
  assert len(exclude(train, held_out)) <= len(train)
