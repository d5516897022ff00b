"""JSON from strangers: sizes capped, duplicate keys refused, only ModelFileError comes out."""

import json
import pathlib
from typing import Any

from rlax_stack.errors import ModelFileError


def parse_json_object(text: bytes | str, *, name: str) -> dict[str, Any]:
  """The object that `text` holds; `name` is how errors call it.

  Raises:
    ModelFileError: not JSON, not an object at the top, nested too deep, NaN, or a key given twice.
  """
  try:
    value = json.loads(
      text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_int=_parse_int
    )
  except RecursionError as error:
    raise ModelFileError(f'{name}: nested too deep. Download the file again.') from error
  except ValueError as error:
    raise ModelFileError(f'{name}: not valid JSON ({error}). Download the file again.') from error
  if not isinstance(value, dict):
    raise ModelFileError(f'{name}: expected an object, got {type(value).__name__}.')
  return value


def read_json_object(path: pathlib.Path, *, size_limit: int) -> dict[str, Any]:
  """The object in the file at `path`, of at most `size_limit` bytes.

  Raises:
    ModelFileError: missing, too large, or malformed as in `parse_json_object`.
  """
  return parse_json_object(read_bytes(path, size_limit=size_limit), name=path.name)


def read_bytes(path: pathlib.Path, *, size_limit: int) -> bytes:
  """The bytes of the file at `path`, refused above `size_limit` before they are read.

  Raises:
    ModelFileError: missing, unreadable or too large.
  """
  try:
    size = path.stat().st_size
    if size > size_limit:
      raise ModelFileError(f'{path}: {size} bytes, above the limit of {size_limit}.')
    return path.read_bytes()
  except OSError as error:
    raise ModelFileError(f'{path}: cannot be read ({error.strerror}). Check the path.') from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  result = dict(pairs)
  if len(result) != len(pairs):
    seen: set[str] = set()
    for key, _ in pairs:
      if key in seen:
        raise ValueError(f'key {key!r} occurs twice')
      seen.add(key)
  return result


def _refuse_constant(name: str) -> Any:
  raise ValueError(f'{name} is not a JSON number')


def _parse_int(digits: str) -> int:
  if len(digits) > 40:  # parsing is quadratic, and no honest field is longer
    raise ValueError('a whole number of more than 40 digits')
  return int(digits)
