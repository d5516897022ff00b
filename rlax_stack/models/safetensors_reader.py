"""Reads safetensors: the header first, checked whole, then single tensors through a memory map.

Stricter than most readers: a byte of the file belongs to exactly one tensor, and a name occurs
once, so the file means one thing only. Nothing the size of the model is allocated before the header
was checked. Writing goes through the `safetensors` library (`hf.py`).
"""

import dataclasses
import math
import pathlib

import ml_dtypes
import numpy as np

from rlax_stack.errors import ModelFileError
from rlax_stack.models.json_file import parse_json_object

_HEADER_LIMIT = 32 * 2**20  # bytes; the largest published shards have below 1 MiB
_RANK_LIMIT = 8
_DTYPES = {
  'F64': np.dtype(np.float64),
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
}
_CURE = 'Download the file again.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
  """Where one tensor lies: bytes [start, stop) of the file at `path`."""

  name: str
  path: pathlib.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  start: int
  stop: int

  def read(self) -> np.ndarray:
    """The tensor, as a read-only view of the mapped file: `shape`, `dtype`."""
    if self.start == self.stop:
      return np.zeros(self.shape, self.dtype)
    raw = np.memmap(
      self.path, np.uint8, mode='r', offset=self.start, shape=(self.stop - self.start,)
    )
    return raw.view(self.dtype).reshape(self.shape)


def read_header(path: pathlib.Path) -> dict[str, TensorEntry]:
  """Every tensor of the file by name. Reads the header only.

  Raises:
    ModelFileError: missing or torn file, header too large or malformed, unknown dtype, offsets that
      overlap, leave holes, go past the end, or do not fit shape and dtype.
  """
  try:
    size = path.stat().st_size
    with path.open('rb') as file:
      prefix = file.read(8)
      length = int.from_bytes(prefix, 'little')
      if len(prefix) < 8 or length > size - 8:
        raise ModelFileError(
          f'{path.name}: truncated: {size} bytes, the header alone says {length}. {_CURE}'
        )
      if length > _HEADER_LIMIT:
        raise ModelFileError(f'{path.name}: header of {length} bytes, limit {_HEADER_LIMIT}.')
      text = file.read(length)
  except OSError as error:
    raise ModelFileError(f'{path}: cannot be read ({error.strerror}). Check the path.') from error
  fields = parse_json_object(text, name=f'{path.name} (header)')
  fields.pop('__metadata__', None)
  entries = {name: _entry(path, name, value, 8 + length) for name, value in fields.items()}
  _check_cover(path, entries, 8 + length, size)
  return entries


def _entry(path: pathlib.Path, name: str, value: object, base: int) -> TensorEntry:
  if not isinstance(value, dict) or set(value) != {'dtype', 'shape', 'data_offsets'}:
    raise ModelFileError(f'{path.name}: {name}: expected dtype, shape and data_offsets. {_CURE}')
  code = value['dtype']
  if not isinstance(code, str) or code not in _DTYPES:
    raise ModelFileError(
      f'{path.name}: {name} has dtype {code!r}, supported are {", ".join(_DTYPES)}. '
      'Convert the weights to one of them.'
    )
  shape, offsets = value['shape'], value['data_offsets']
  if not _whole_numbers(shape) or len(shape) > _RANK_LIMIT:
    raise ModelFileError(f'{path.name}: {name} has an impossible shape {str(shape)[:200]}. {_CURE}')
  if not _whole_numbers(offsets) or len(offsets) != 2:
    raise ModelFileError(f'{path.name}: {name} has impossible data_offsets. {_CURE}')
  start, stop = offsets
  needed = math.prod(shape) * _DTYPES[code].itemsize
  if stop - start != needed:
    raise ModelFileError(
      f'{path.name}: {name} of shape {tuple(shape)} and dtype {code} needs {needed} bytes, '
      f'its data_offsets hold {stop - start}. {_CURE}'
    )
  return TensorEntry(
    name=name,
    path=path,
    dtype=_DTYPES[code],
    shape=tuple(shape),
    start=base + start,
    stop=base + stop,
  )


def _whole_numbers(value: object) -> bool:
  return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(path: pathlib.Path, entries: dict, base: int, size: int) -> None:
  """Sorted by start, each tensor begins where the one before ends, and the last ends the file."""
  end = base
  for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
    if entry.start != end:
      word = 'overlaps another tensor' if entry.start < end else 'follows a hole'
      raise ModelFileError(f'{path.name}: {entry.name} {word} at byte {entry.start}. {_CURE}')
    end = entry.stop
  if end != size:
    word = 'truncated' if end > size else 'has bytes that no tensor owns'
    raise ModelFileError(f'{path.name}: {word}: {size} bytes, the header says {end}. {_CURE}')
