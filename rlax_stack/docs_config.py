"""Writes docs/config.md from configs/base.py, so that the page and the fields cannot drift apart.

    python -m rlax_stack.docs_config            writes docs/config.md
    python -m rlax_stack.docs_config --check    fails where the page is not up to date

The source is read, not run: names and defaults come from its assignments, descriptions from the
comments beside them. A comment on lines of its own describes the field below it.
"""

import ast
import io
import pathlib
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from absl import app, flags, logging

from rlax_stack.errors import ConfigError

_CHECK = flags.DEFINE_bool('check', False, 'Compare with the page that is there and write nothing.')

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / 'configs' / 'base.py'
PAGE = ROOT / 'docs' / 'config.md'

_HEAD = """# Config

<!-- Generated from configs/base.py by `make docs`; edit that file instead. -->

Every field of a run. A config file (`configs/*.py`) changes a few of them, the command line any one:

    python -m rlax_stack.launch --config=configs/quickstart.py --config.rollout.group_size=16

Names and types are checked, and an unknown name is answered with the nearest one. The run's folder keeps the config it
ran with.
"""


class Field(NamedTuple):
  """One config field: dotted name below `config.`, default as written, what its comment says."""

  name: str
  default: str
  description: str


class Section(NamedTuple):
  """Fields that share their first name."""

  name: str
  description: str
  fields: list[Field]


def _comments(text: str) -> dict[int, tuple[str, bool]]:
  """Line to (comment without its mark, whether it stands alone on the line)."""
  found = {}
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      alone = not token.line[: token.start[1]].strip()
      found[token.start[0]] = (token.string.lstrip('# ').rstrip(), alone)
  return found


def _describe(node: ast.stmt, comments: dict[int, tuple[str, bool]]) -> str:
  """The comment at the end of the statement, else the block of comments right above it."""
  end = comments.get(node.end_lineno or node.lineno)
  if end and not end[1]:
    return end[0]
  lines, line = [], node.lineno - 1
  while line in comments and comments[line][1]:
    lines.insert(0, comments[line][0])
    line -= 1
  return ' '.join(lines)


def _config_assignments(function: ast.FunctionDef) -> Iterator[tuple[str, ast.Assign]]:
  for node in function.body:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
      name = ast.unparse(node.targets[0])
      if name.startswith('config.'):
        yield name.removeprefix('config.'), node


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
  for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name == name:
      return node
  raise ConfigError(f'configs/base.py has no function {name}. docs/config.md is made from it.')


def _source_fields(tree: ast.Module, comments: dict[int, tuple[str, bool]]) -> list[Field]:
  """The fields of one prompt source: the keys of the dict literal in `source()`."""
  for node in ast.walk(_function(tree, 'source')):
    if isinstance(node, ast.Dict) and node.keys and all(node.keys):
      return [
        Field(str(key.value), ast.unparse(value), comments.get(key.lineno, ('', False))[0])
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
      ]
  raise ConfigError('source() of configs/base.py holds no dict of fields.')


def read_sections(text: str) -> list[Section]:
  """Sections and fields of a base config, in its order.

  Args:
    text: Python source like that of configs/base.py.

  Returns:
    Fields without a section come first, under the name ''. The fields of a prompt source come last.

  Raises:
    ConfigError: the source lacks `get_config` or `source`.
  """
  tree, comments = ast.parse(text), _comments(text)
  sections = {'': Section('', '', [])}
  for name, node in _config_assignments(_function(tree, 'get_config')):
    description, value = _describe(node, comments), ast.unparse(node.value)
    head, _, rest = name.partition('.')
    if value == 'ConfigDict()' and not rest:
      sections[head] = Section(head, description, [])
    elif value != 'ConfigDict()':
      sections[head if rest else ''].fields.append(Field(name, value, description))
  fields = _source_fields(tree, comments)
  return [
    *sections.values(),
    Section('source', 'A prompt source: `data.train` and `data.eval`.', fields),
  ]


def render(text: str) -> str:
  """The whole page as Markdown for the source of a base config."""
  page = [_HEAD]
  for section in read_sections(text):
    page.append(f'## {section.name or "The run"}\n')
    if section.description:
      page.append(section.description[0].upper() + section.description[1:].rstrip('.') + '.\n')
    if section.fields:
      page.append('| field | default | meaning |\n|---|---|---|')
    for field in section.fields:
      description = field.description.replace('<', '&lt;')
      cells = (f'`{field.name}`', f'`{field.default}`', description)
      page.append('| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |')
    if section.fields:
      page.append('')
  return '\n'.join(page).rstrip() + '\n'


def write_or_check(path: pathlib.Path, page: str, source: str) -> None:
  """Writes a page; with --check compares it with what is there, ConfigError where they differ."""
  if not _CHECK.value:
    path.write_text(page, encoding='utf-8')
    logging.info('wrote %s', path)
  elif not path.exists() or path.read_text(encoding='utf-8') != page:
    raise ConfigError(f'docs/{path.name} is not what {source} says. Run `make docs`.')


def main(argv: list[str]) -> None:
  """Writes or checks docs/config.md."""
  del argv
  write_or_check(PAGE, render(SOURCE.read_text(encoding='utf-8')), 'configs/base.py')


if __name__ == '__main__':
  app.run(main)
