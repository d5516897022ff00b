"""JSON values, atomic replacement and the cutting back of line files."""

import dataclasses
import enum
import json
import math
import os
from pathlib import Path

import pytest

from rlax_stack.observe import json_files


class Colour(enum.Enum):
  RED = 'red'


@dataclasses.dataclass(frozen=True)
class Inner:
  rate: float
  names: tuple[str, ...]


def test_to_json_value_of_everything_a_config_holds():
  value = {'inner': Inner(0.5, ('a',)), 'path': Path('x/y'), 'c': Colour.RED, 'none': None, 1: True}
  assert json_files.to_json_value(value) == {
    'inner': {'rate': 0.5, 'names': ['a']},
    'path': 'x/y',
    'c': 'red',
    'none': None,
    '1': True,
  }
  assert json_files.to_json_value([math.inf, -math.inf]) == ['inf', '-inf']
  assert json_files.to_json_value(math.nan) == 'nan'
  assert json_files.to_json_value({3, 1, 2}) == [1, 2, 3]


def test_to_json_value_refuses_objects():
  with pytest.raises(TypeError, match='no JSON form for object'):
    json_files.to_json_value(object())


def test_flatten():
  assert json_files.flatten({'a': {'b': 1, 'c': {}}, 'd': [1, {'e': 2}]}) == {
    'a.b': 1,
    'a.c': {},
    'd': [1, {'e': 2}],
  }


def test_a_failed_replacement_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
  path = tmp_path / 'config.json'
  json_files.write_json_atomic(path, {'a': 1})

  def fail(*args):
    raise OSError('disk full')

  monkeypatch.setattr(os, 'replace', fail)
  with pytest.raises(OSError, match='disk full'):
    json_files.write_text_atomic(path, 'half')
  assert json.loads(path.read_text()) == {'a': 1}
  assert os.listdir(tmp_path) == ['config.json']


def test_write_bytes_atomic(tmp_path):
  json_files.write_bytes_atomic(tmp_path / 'x', b'\0\1')
  assert (tmp_path / 'x').read_bytes() == b'\0\1'


def test_lines_are_ascii_and_come_back():
  text = 'a\x1b[2J\u2028é\ud800</script>\n'
  line = json_files.dumps_line({'text': text})
  assert line.isascii() and line.count('\n') == 1 and '\x1b' not in line
  assert json.loads(line) == {'text': text}


def test_keep_lines_up_to_drops_later_torn_and_foreign_lines(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  json_files.write_lines_atomic(path, [{'step': step, 'x': step * 2} for step in range(5)])
  with open(path, 'a') as file:
    file.write('[1]\n{"x": 1}\n{"step": true}\n{"step": 1, "x": NaN}\n{"step": 2, "x"')
  assert json_files.keep_lines_up_to(path, 2) == 3
  assert list(json_files.read_lines(path)) == [{'step': step, 'x': step * 2} for step in range(3)]
  assert json_files.keep_lines_up_to(path, -1) == 0
  assert path.read_text() == ''


def test_a_missing_file_has_no_lines(tmp_path):
  assert list(json_files.read_lines(tmp_path / 'none')) == []
  assert json_files.keep_lines_up_to(tmp_path / 'none', 3) == 0
  assert not (tmp_path / 'none').exists()
