"""Reads the GGUF format (versions 2 and 3, little-endian): metadata, then where each tensor lies.

Every length in the file is checked against a cap and against the bytes that are left before
anything is allocated; offsets must stay inside the file and tensors apart. What the metadata means
is for `gguf.py`.
"""

import dataclasses
import math
import os
import pathlib
import struct
from typing import Any

import numpy as np

from rlax_stack.errors import ModelFileError
from rlax_stack.models.gguf_blocks import BLOCK_KINDS, BlockKind

_COUNT_LIMIT = 65_536  # tensors, and metadata fields
_ARRAY_LIMIT = 4 * 2**20  # items; the largest known vocabularies have 0.3 million
_STRING_LIMIT = 2**20  # bytes
_NAME_LIMIT = 256  # bytes of a field's or tensor's name
_RANK_LIMIT = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
  0: np.dtype('<u1'),
  1: np.dtype('<i1'),
  2: np.dtype('<u2'),
  3: np.dtype('<i2'),
  4: np.dtype('<u4'),
  5: np.dtype('<i4'),
  6: np.dtype('<f4'),
  _BOOL: np.dtype('?'),
  10: np.dtype('<u8'),
  11: np.dtype('<i8'),
  12: np.dtype('<f8'),
}
_CURE = 'Download the file again.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
  """One tensor: `shape` slowest axis first, bytes [start, stop) of the file."""

  name: str
  kind: BlockKind
  shape: tuple[int, ...]
  start: int
  stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFFile:
  """An open file: metadata (numbers, strings, lists of strings, 1-D arrays), tensors by name."""

  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, GGUFTensor]
  data: np.ndarray  # uint8, the mapped file

  def read(self, name: str) -> np.ndarray:
    """The tensor `name` dequantised, float32 of its shape."""
    tensor = self.tensors[name]
    return tensor.kind.decode(self.data[tensor.start : tensor.stop]).reshape(tensor.shape)


def read_gguf(path: str | os.PathLike) -> GGUFFile:
  """Opens a file and checks all of it but the numbers in the tensors.

  Raises:
    ModelFileError: missing, truncated, of another version, lengths above the caps, names that occur
      twice, unknown tensor types, tensors outside the file or over each other.
  """
  path = pathlib.Path(path)
  try:
    data = np.memmap(path, np.uint8, mode='r').view(np.ndarray)
  except (OSError, ValueError) as error:  # ValueError: an empty file
    raise ModelFileError(f'{path}: cannot be read ({error}). Check the path.') from error
  cursor = _Cursor(data, path.name)
  if cursor.take(4) != b'GGUF':
    raise ModelFileError(f'{path.name}: not a GGUF file. Check the path.')
  version = cursor.scalar('<I')
  if version not in (2, 3):
    raise ModelFileError(
      f'{path.name}: GGUF version {version} (or big-endian), supported are 2 and 3. '
      'Convert the model with a current llama.cpp.'
    )
  num_tensors = cursor.count('tensors', _COUNT_LIMIT, item_bytes=24)
  num_fields = cursor.count('metadata fields', _COUNT_LIMIT, item_bytes=13)
  metadata: dict[str, Any] = {}
  for _ in range(num_fields):
    key = cursor.string(_NAME_LIMIT)
    if key in metadata:
      raise ModelFileError(f'{path.name}: metadata {key!r} occurs twice. {_CURE}')
    metadata[key] = cursor.value(cursor.scalar('<I'))
  infos = [cursor.tensor_info() for _ in range(num_tensors)]
  tensors = _place(infos, cursor, metadata.get('general.alignment', 32))
  return GGUFFile(path=path, metadata=metadata, tensors=tensors, data=data)


def _place(
  infos: list[tuple[str, BlockKind, tuple[int, ...], int]], cursor: '_Cursor', alignment: Any
) -> dict[str, GGUFTensor]:
  """Absolute, checked positions of the tensors."""
  if type(alignment) is not int or alignment not in (8, 16, 32, 64, 128, 256, 512, 1024, 4096):
    raise ModelFileError(f'{cursor.name}: general.alignment {alignment!r} is impossible. {_CURE}')
  base = -(-cursor.position // alignment) * alignment
  tensors: dict[str, GGUFTensor] = {}
  for name, kind, shape, offset in infos:
    start = base + offset
    stop = start + kind.size_bytes(math.prod(shape))
    if offset % alignment or stop > len(cursor.data):
      raise ModelFileError(
        f'{cursor.name}: {name} lies at bytes {start} to {stop} of {len(cursor.data)}: truncated, '
        f'or not aligned to {alignment}. {_CURE}'
      )
    if name in tensors:
      raise ModelFileError(f'{cursor.name}: tensor {name!r} occurs twice. {_CURE}')
    tensors[name] = GGUFTensor(name=name, kind=kind, shape=shape, start=start, stop=stop)
  end = base
  for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
    if tensor.start < end:
      raise ModelFileError(f'{cursor.name}: {tensor.name} overlaps another tensor. {_CURE}')
    end = tensor.stop
  return tensors


class _Cursor:
  """Walks through the header; every step is checked against the end of the file."""

  def __init__(self, data: np.ndarray, name: str):
    self.data = memoryview(data)  # slices at a tenth of numpy's cost
    self.name = name
    self.position = 0

  def take(self, size: int) -> memoryview:
    """The next `size` bytes."""
    stop = self.position + size
    if stop > len(self.data):
      raise ModelFileError(
        f'{self.name}: truncated: {len(self.data)} bytes, the header goes on to {stop}. {_CURE}'
      )
    part = self.data[self.position : stop]
    self.position = stop
    return part

  def scalar(self, code: str) -> Any:
    """The next number, `code` as in `struct`."""
    return struct.unpack(code, self.take(struct.calcsize(code)))[0]

  def count(self, what: str, limit: int, *, item_bytes: int) -> int:
    """A count of things that need at least `item_bytes` each."""
    number = self.scalar('<Q')
    left = len(self.data) - self.position
    if number > limit or number * item_bytes > left:
      raise ModelFileError(
        f'{self.name}: {number} {what}, limit {limit}, {left} bytes left in the file. {_CURE}'
      )
    return number

  def string(self, limit: int) -> str:
    """A string of at most `limit` bytes. Bytes that are not UTF-8 (byte tokens) are kept as escapes."""
    size = self.count('bytes of a string', limit, item_bytes=1)
    return str(self.take(size), 'utf-8', errors='surrogateescape')

  def value(self, code: int) -> Any:
    """A metadata value of type `code`: a number, a string, or an array of either."""
    if code == _STRING:
      return self.string(_STRING_LIMIT)
    if code == _ARRAY:
      return self._array()
    return self._numbers(code, 1)[0].item()

  def _array(self) -> Any:
    code = self.scalar('<I')
    if code == _STRING:
      count = self.count('strings', _ARRAY_LIMIT, item_bytes=8)
      return [self.string(_STRING_LIMIT) for _ in range(count)]
    if code == _ARRAY:
      raise ModelFileError(f'{self.name}: arrays of arrays are not supported. {_CURE}')
    count = self.count('numbers', _ARRAY_LIMIT, item_bytes=1)
    return self._numbers(code, count)

  def _numbers(self, code: int, count: int) -> np.ndarray:
    dtype = _SCALARS.get(code)
    if dtype is None:
      raise ModelFileError(f'{self.name}: metadata of unknown type {code}. {_CURE}')
    raw = np.frombuffer(self.take(count * dtype.itemsize), np.uint8)
    return raw != 0 if code == _BOOL else raw.copy().view(dtype)

  def tensor_info(self) -> tuple[str, BlockKind, tuple[int, ...], int]:
    """Name, kind, shape (slowest axis first) and offset of one tensor."""
    name = self.string(_NAME_LIMIT)
    rank = self.scalar('<I')
    if not 1 <= rank <= _RANK_LIMIT:
      raise ModelFileError(f'{self.name}: {name!r} has {rank} axes, supported 1 to 4. {_CURE}')
    fastest_first = [self.scalar('<Q') for _ in range(rank)]
    code = self.scalar('<I')
    offset = self.scalar('<Q')
    kind = BLOCK_KINDS.get(code)
    if kind is None:
      names = ', '.join(known.name for known in BLOCK_KINDS.values())
      raise ModelFileError(
        f'{self.name}: {name!r} has tensor type {code}, supported are {names}. '
        'Quantise the model to one of them.'
      )
    if 0 in fastest_first or fastest_first[0] % kind.block_items:
      raise ModelFileError(
        f'{self.name}: {name!r} has shape {fastest_first[::-1]}, which {kind.name} cannot have. {_CURE}'
      )
    return name, kind, tuple(fastest_first[::-1]), offset
