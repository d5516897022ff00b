"""Writes docs/algorithms.md from configs/recipes/ and the tables of boxes.

    python -m rlax_stack.docs_algorithms            writes docs/algorithms.md
    python -m rlax_stack.docs_algorithms --check    fails where the page is not up to date

A recipe's docstring says its title on the first line, its paper with a link, and `Test: path::name`.
"""

import importlib
import inspect
import pathlib
import re
from typing import NamedTuple

from absl import app

from rlax_stack.config import RunConfig, from_config_dict
from rlax_stack.docs_config import write_or_check
from rlax_stack.errors import ConfigError
from rlax_stack.objectives.boxes import Box, box_options
from rlax_stack.objectives.objective import TABLES

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = ROOT / 'configs' / 'recipes'
PAGE = ROOT / 'docs' / 'algorithms.md'

_HEAD = """# Algorithms

<!-- Generated from configs/recipes/ and rlax_stack/objectives/ by `make docs`; edit those instead. -->

A method is a recipe: a config file that names one box per slot. Run one, or override any box on the command line:

    python -m rlax_stack.launch --config=configs/recipes/dapo.py
    python -m rlax_stack.launch --config=configs/recipes/dapo.py \\
        --config.objective.trust_region='dual_clip(absolute_high=4)'

Bounds say what they bound: `delta` is a distance from 1 (in log space from 0), `absolute` a value.
`auto` among the corrections is `token_tis(absolute_high=2)` where samples may be stale or come from quantised weights
or KV, or a batch gets several updates, and nothing otherwise.

## Methods
"""


class Recipe(NamedTuple):
  """One recipe file and what its docstring says."""

  name: str
  title: str
  paper: str  # the link
  test: str  # path::name
  config: RunConfig


def read_recipes() -> list[Recipe]:
  """Every recipe, by name.

  Raises:
    ConfigError: a docstring without a link or a test, or a config that cannot be read.
  """
  return [_read(path.stem) for path in sorted(RECIPES.glob('*.py')) if path.stem != '__init__']


def _read(name: str) -> Recipe:
  module = importlib.import_module(f'configs.recipes.{name}')
  text = inspect.getdoc(module) or ''
  link, test = re.search(r'\((https?://[^)\s]+)\)', text), re.search(r'^Test: (\S+)$', text, re.M)
  if link is None or test is None:
    raise ConfigError(
      f'the docstring of configs/recipes/{name}.py needs a link in brackets and a line '
      f'"Test: tests/...::name", got {text!r}.'
    )
  return Recipe(name, text.splitlines()[0], link[1], test[1], from_config_dict(module.get_config()))


def _boxes(config: RunConfig) -> str:
  """The boxes of a recipe, one to a line of the table's cell."""
  section, lines = config.objective, []
  for slot in TABLES:
    value = getattr(section, slot)
    named = [value] if isinstance(value, str) else list(value)
    if named and (slot, named) != ('critic', ['none']):
      lines.append(f'{slot}: {", ".join(f"`{box}`" for box in named)}')
  if config.rollout.strategy != 'independent':
    lines.append(f'rollout.strategy: `{config.rollout.strategy}`')
  if config.roles.kind != 'none':
    lines.append(f'roles.kind: `{config.roles.kind}`')
  return '<br>'.join(lines)


def _options(box: Box) -> str:
  options = box_options(box).items()
  return ', '.join(f'`{name}={default!r}`' for name, (_, default) in options)


def render() -> str:
  """The whole page as Markdown."""
  page = [_HEAD, '| method | boxes | recipe | paper | test |\n|---|---|---|---|---|']
  for recipe in read_recipes():
    title = recipe.title.rstrip('.')
    file, test = f'configs/recipes/{recipe.name}.py', recipe.test.replace('tests/unit/', '')
    page.append(
      f'| {title} | {_boxes(recipe.config)} | [{file}](../{file}) | [paper]({recipe.paper}) | `{test}` |'
    )
  page.append('\n## Boxes\n')
  for slot, table in TABLES.items():
    page.append(f'### `config.objective.{slot}`\n\n| box | options | meaning |\n|---|---|---|')
    for name, box in table.items():
      meaning = (inspect.getdoc(box.function) or '').split('\n\n')[0].replace('\n', ' ')
      page.append(f'| `{name}` | {_options(box)} | {meaning.replace("|", "&#124;")} |')
    page.append('')
  return '\n'.join(page).rstrip() + '\n'


def main(argv: list[str]) -> None:
  """Writes or checks docs/algorithms.md."""
  del argv
  write_or_check(PAGE, render(), 'configs/recipes/')


if __name__ == '__main__':
  app.run(main)
