import struct

import ml_dtypes
import numpy as np
import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models.gguf_blocks import BLOCK_KINDS
from rlax_stack.models.gguf_reader import read_gguf


@pytest.fixture
def read(tmp_path):
  def run(raw):
    path = tmp_path / 'model.gguf'
    path.write_bytes(raw)
    return read_gguf(path)

  return run


def _f32(*shape):
  return 'F32', shape, np.arange(np.prod(shape), dtype='<f4').tobytes()


def test_metadata_and_tensors_come_back(read, gguf_bytes):
  metadata = {
    'text': 'naïve',
    'number': 7,
    'real': 0.5,
    'flag': True,
    'words': ['a', '', 'bc'],
    'numbers': np.asarray([3, -1]),
  }
  file = read(gguf_bytes(metadata, {'w': _f32(2, 3), 'v': _f32(5)}))
  numbers = file.metadata.pop('numbers')
  assert numbers.tolist() == [3, -1]
  assert file.metadata == {key: metadata[key] for key in file.metadata}
  np.testing.assert_array_equal(file.read('w'), [[0, 1, 2], [3, 4, 5]])
  np.testing.assert_array_equal(file.read('v'), [0, 1, 2, 3, 4])


def test_plain_types_are_read_exactly(read, gguf_bytes):
  values = np.asarray([1.5, -2.25, 0.0, 96.0], np.float32)
  for kind, dtype in (('F32', '<f4'), ('F16', '<f2'), ('BF16', ml_dtypes.bfloat16)):
    file = read(gguf_bytes({}, {'w': (kind, (4,), values.astype(dtype).tobytes())}))
    assert file.read('w').dtype == np.float32
    np.testing.assert_array_equal(file.read('w'), values)


def test_quantised_blocks_by_hand():
  integers = np.arange(-16, 16, dtype=np.int8)
  raw = np.float16(0.5).tobytes() + integers.tobytes()
  got = BLOCK_KINDS[8].decode(np.frombuffer(raw, np.uint8))
  np.testing.assert_array_equal(got, integers * 0.5)

  low, high = np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8)[::-1]
  nibbles = np.concatenate((low, high)).astype(np.float32)
  packed = (low | (high << 4)).tobytes()
  raw = 2 * (np.float16(0.25).tobytes() + packed)
  got = BLOCK_KINDS[2].decode(np.frombuffer(raw, np.uint8))
  np.testing.assert_array_equal(got, np.tile((nibbles - 8) * 0.25, 2))

  raw = np.float16(2).tobytes() + np.float16(-3).tobytes() + packed
  got = BLOCK_KINDS[3].decode(np.frombuffer(raw, np.uint8))
  np.testing.assert_array_equal(got, nibbles * 2 - 3)


def test_every_truncation_is_refused(read, gguf_bytes):
  raw = gguf_bytes({'a': 'b', 'c': ['d', 'e']}, {'w': _f32(2, 3)})
  whole = len(raw) - 8  # the last tensor is padded to the alignment
  for length in range(whole):
    with pytest.raises(ModelFileError):
      read(raw[:length])
  read(raw[:whole])


@pytest.mark.parametrize(
  ('position', 'value', 'word'),
  [
    (4, struct.pack('<I', 1), 'version 1'),
    (8, struct.pack('<Q', 2**60), 'tensors'),
    (16, struct.pack('<Q', 2**60), 'metadata fields'),
    (24, struct.pack('<Q', 2**60), 'bytes of a string'),
    (33, struct.pack('<I', 99), 'unknown type 99'),
  ],
)
def test_hostile_numbers_are_refused(read, gguf_bytes, position, value, word):
  raw = bytearray(gguf_bytes({'a': 1}, {'w': _f32(2)}))
  raw[position : position + len(value)] = value
  with pytest.raises(ModelFileError, match=word):
    read(bytes(raw))


def test_hostile_arrays_are_refused(read, gguf_bytes):
  raw = gguf_bytes({'a': 'xxxxxxxxxxxxxxxxxxxx'}, {})
  for inner, count, word in ((8, 2**50, 'strings'), (4, 2**50, 'numbers'), (9, 1, 'arrays')):
    hostile = raw[:33] + struct.pack('<IIQ', 9, inner, count) + bytes(8)
    with pytest.raises(ModelFileError, match=word):
      read(hostile)


@pytest.mark.parametrize(
  ('tensors', 'word'),
  [
    ({'w': (13, (32,), bytes(64))}, 'tensor type 13'),
    ({'w': ('Q8_0', (33,), bytes(64))}, 'Q8_0 cannot have'),
    ({'w': ('F32', (0,), b'')}, 'cannot have'),
    ({'w': ('F32', (2, 2, 2, 2, 2), bytes(128))}, '5 axes'),
    ({'w': ('F32', (2**40, 2**40), bytes(64))}, 'truncated'),
    ({'w': ('F32', (16,), bytes(32)), 'v': ('F32', (8,), bytes(32))}, 'overlaps'),
    ({'w' * 300: ('F32', (8,), bytes(32))}, 'bytes of a string'),
  ],
)
def test_impossible_tensors_are_refused(read, gguf_bytes, tensors, word):
  with pytest.raises(ModelFileError, match=word):
    read(gguf_bytes({}, tensors))


def test_names_that_occur_twice_are_refused(read, gguf_bytes):
  raw = gguf_bytes({'key-a': 1, 'key-b': 1}, {})
  with pytest.raises(ModelFileError, match='twice'):
    read(raw.replace(b'key-b', b'key-a'))
  raw = gguf_bytes({}, {'ten-a': _f32(2), 'ten-b': _f32(2)})
  with pytest.raises(ModelFileError, match='twice'):
    read(raw.replace(b'ten-b', b'ten-a'))


def test_other_files_are_refused(read, tmp_path, gguf_bytes):
  with pytest.raises(ModelFileError, match='not a GGUF'):
    read(b'PK\x03\x04' + bytes(100))
  with pytest.raises(ModelFileError, match='cannot be read'):
    read(b'')
  with pytest.raises(ModelFileError, match='cannot be read'):
    read_gguf(tmp_path / 'nothing.gguf')
  with pytest.raises(ModelFileError, match='alignment'):
    read(gguf_bytes({'general.alignment': 3}, {}))


def test_block_sizes_in_bytes():
  assert BLOCK_KINDS[8].size_bytes(64) == 2 * (2 + 32)
  assert BLOCK_KINDS[2].size_bytes(64) == 2 * (2 + 16)
  assert BLOCK_KINDS[3].size_bytes(64) == 2 * (4 + 16)
