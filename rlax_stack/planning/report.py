"""A plan as rows of a table and as JSON, with the label of every figure: counted, compiled or modelled."""

import dataclasses
import json
import pathlib
from typing import Any

from rlax_stack.errors import ConfigError

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Line:
  """One figure: what it is, its value and unit in words, and how it is known."""

  name: str
  value: str
  known: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What is printed and saved; `summary` is the last line."""

  title: str
  sections: tuple[tuple[str, tuple[Line, ...]], ...]
  summary: dict[str, Any]

  def text(self) -> str:
    """The table, and the summary as one line of JSON."""
    lines = [self.title]
    for name, section in self.sections:
      lines += ['', name]
      lines += [f'  {line.name:36s}{line.value:>22s}  {line.known}' for line in section]
    return '\n'.join([*lines, '', json.dumps(self.summary)])

  def save(self, path: str) -> None:
    """Writes the text.

    Raises:
      ConfigError: a path that cannot be written.
    """
    try:
      pathlib.Path(path).write_text(self.text() + '\n', encoding='utf-8')
    except OSError as error:
      raise ConfigError(f'--out={path} cannot be written: {error}') from error


def gib(count: float) -> str:
  """Bytes in words."""
  return f'{count / _GIB:.2f} GiB'


def seconds(value: float) -> str:
  """Seconds in words."""
  return f'{value * 1e3:.2f} ms' if value < 0.1 else f'{value:.2f} s'
