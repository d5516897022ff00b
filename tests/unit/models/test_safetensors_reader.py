import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rlax_stack.errors import ModelFileError
from rlax_stack.models.json_file import parse_json_object, read_json_object
from rlax_stack.models.safetensors_reader import read_header


def _entry(start, stop, *, dtype='F32', shape=None):
  shape = [(stop - start) // 4] if shape is None else shape
  return {'dtype': dtype, 'shape': shape, 'data_offsets': [start, stop]}


def _raw(header, data):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return len(text).to_bytes(8, 'little') + text + data


@pytest.fixture
def read(tmp_path):
  def run(raw):
    path = tmp_path / 'model.safetensors'
    path.write_bytes(raw)
    return read_header(path)

  return run


def test_tensors_of_the_library_come_back(tmp_path):
  rng = np.random.default_rng(0)
  tensors = {
    'a': rng.standard_normal((3, 4)).astype(np.float32),
    'b': rng.standard_normal((5,)).astype(np.float16),
    'c': rng.standard_normal((2, 2, 2)).astype(ml_dtypes.bfloat16),
    'd': np.zeros((0, 4), np.float32),
    'e': np.asarray(3.5, np.float64),
  }
  path = tmp_path / 'model.safetensors'
  save_file(tensors, path, metadata={'format': 'pt'})
  entries = read_header(path)
  assert entries.keys() == tensors.keys()
  for name, value in tensors.items():
    assert entries[name].dtype == value.dtype
    np.testing.assert_array_equal(entries[name].read(), value)


def test_every_truncation_is_refused(read):
  raw = _raw({'a': _entry(0, 8), 'b': _entry(8, 16)}, bytes(16))
  read(raw)
  for length in range(len(raw)):
    with pytest.raises(ModelFileError):
      read(raw[:length])


@pytest.mark.parametrize(
  ('header', 'word'),
  [
    ({'a': _entry(0, 8), 'b': _entry(4, 12), 'c': _entry(12, 16)}, 'overlaps'),
    ({'a': _entry(0, 8), 'b': _entry(0, 8), 'c': _entry(8, 16)}, 'overlaps'),
    ({'a': _entry(0, 4), 'b': _entry(8, 16)}, 'hole'),
    ({'a': _entry(4, 16)}, 'hole'),
    ({'a': _entry(0, 8)}, 'no tensor owns'),
    ({'a': _entry(0, 32)}, 'truncated'),
    ({'a': _entry(16, 0, shape=[4])}, 'needs 16 bytes'),
    ({'a': _entry(-8, 8, shape=[4])}, 'data_offsets'),
    ({'a': _entry(0, 16, shape=[5])}, 'needs 20 bytes'),
    ({'a': _entry(0, 16, shape=[-2, -2])}, 'impossible shape'),
    ({'a': _entry(0, 16, shape=[2**70])}, 'needs'),
    ({'a': _entry(0, 16, shape=[True, 4])}, 'impossible shape'),
    ({'a': _entry(0, 16, shape=[1] * 9)}, 'impossible shape'),
    ({'a': _entry(0, 16, dtype='F4')}, "dtype 'F4'"),
    ({'a': _entry(0, 16, dtype=['F32'])}, 'dtype'),
    ({'a': {**_entry(0, 16), 'more': 1}}, 'expected dtype, shape'),
    ({'a': 3}, 'expected dtype, shape'),
    (b'[1]', 'expected an object'),
    (b'{"a": 1, "a": 2}', "'a' occurs twice"),
    (b'{"a": NaN}', 'NaN'),
    (b'{"a": \xff}', 'not valid JSON'),
    (b'{"a": ' + b'9' * 50 + b'}', '40 digits'),
    (b'[' * 100_000, 'nested too deep|not valid JSON'),
  ],
)
def test_hostile_headers_are_refused(read, header, word):
  with pytest.raises(ModelFileError, match=word):
    read(_raw(header, bytes(16)))


def test_header_above_the_cap_is_refused_unread(tmp_path):
  path = tmp_path / 'model.safetensors'
  with path.open('wb') as file:
    file.write((2**26).to_bytes(8, 'little'))
    file.truncate(2**26 + 8)  # sparse
  with pytest.raises(ModelFileError, match='header of 67108864 bytes'):
    read_header(path)


def test_json_files(tmp_path):
  path = tmp_path / 'a.json'
  path.write_text('{"a": [1, 2.5, null]}')
  assert read_json_object(path, size_limit=100) == {'a': [1, 2.5, None]}
  assert parse_json_object('{}', name='x') == {}
  with pytest.raises(ModelFileError, match='above the limit of 5'):
    read_json_object(path, size_limit=5)
  with pytest.raises(ModelFileError, match='cannot be read'):
    read_json_object(tmp_path / 'b.json', size_limit=5)
