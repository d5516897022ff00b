"""JSON on disk: values made plain, files replaced in one piece, line files cut back on resume.

Not for reading untrusted weights or templates.
Invariant: a reader sees a whole old file or a whole new one.
"""

import dataclasses
import enum
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def to_json_value(value: Any) -> Any:
  """Plain JSON values of dataclasses, mappings, sequences, sets, enums, paths and numbers.

  A float that is not finite becomes the text 'nan', 'inf' or '-inf', which JSON has no number for.
  Raises: TypeError for anything else.
  """
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = dataclasses.fields(value)
    return {field.name: to_json_value(getattr(value, field.name)) for field in fields}
  if isinstance(value, enum.Enum):
    return to_json_value(value.value)
  if isinstance(value, Mapping):
    return {str(key): to_json_value(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [to_json_value(item) for item in value]
  if isinstance(value, (set, frozenset)):
    return sorted((to_json_value(item) for item in value), key=str)
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  raise TypeError(f'no JSON form for {type(value).__name__}: {value!r}')


def flatten(value: Any, prefix: str = '') -> dict[str, Any]:
  """Nested mappings as dotted keys. Lists and empty mappings are leaves."""
  if not isinstance(value, Mapping) or not value:
    return {prefix: value} if prefix else {}
  result: dict[str, Any] = {}
  for key, item in value.items():
    result |= flatten(item, f'{prefix}.{key}' if prefix else str(key))
  return result


def write_text_atomic(path: Path, text: str) -> None:
  """Replaces `path` in one piece: a temporary file beside it, flushed, then renamed over it."""
  write_bytes_atomic(path, text.encode('utf-8'))


def write_bytes_atomic(path: Path, data: bytes) -> None:
  """As `write_text_atomic`, of bytes."""
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with open(temporary, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  _sync_folder(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
  """Replaces `path` by indented JSON of plain values."""
  write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + '\n')


def dumps_line(value: Any) -> str:
  """One line of JSON, ASCII only, so that no control character reaches a terminal raw."""
  return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(', ', ': ')) + '\n'


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
  """The objects of a JSON-lines file. Torn and foreign lines are left out; no file, none."""
  if not path.exists():
    return
  with open(path, encoding='utf-8', errors='replace') as file:
    for line in file:
      try:
        value = json.loads(line, parse_constant=_refuse_constant)
      except (ValueError, RecursionError):
        continue
      if isinstance(value, dict):
        yield value


def keep_lines_up_to(path: Path, step: int) -> int:
  """Cuts a JSON-lines file back to the lines whose `step` is at most `step`; torn lines go too.

  Returns: the number of lines kept.
  """
  if not path.exists():
    return 0
  kept = [value for value in read_lines(path) if _step_of(value) <= step]
  write_text_atomic(path, ''.join(map(dumps_line, kept)))
  return len(kept)


def write_lines_atomic(path: Path, values: Iterable[Any]) -> None:
  """Replaces `path` by one JSON line per value."""
  write_text_atomic(path, ''.join(map(dumps_line, values)))


def _refuse_constant(text: str) -> Any:
  """NaN and Infinity are not JSON; a line that holds one was not written here."""
  raise ValueError(f'{text} is not JSON')


def _step_of(value: Mapping[str, Any]) -> float:
  step = value.get('step')
  return step if isinstance(step, (int, float)) and not isinstance(step, bool) else math.inf


def _sync_folder(folder: Path) -> None:
  """Makes the rename itself durable, where the file system can."""
  try:
    descriptor = os.open(folder, os.O_RDONLY)
  except OSError:
    return
  try:
    os.fsync(descriptor)
  except OSError:
    pass
  finally:
    os.close(descriptor)
