"""docs/config.md is generated, complete and up to date."""

import pytest
from absl import flags
from absl.testing import flagsaver

from configs import base
from rlax_stack import docs_config
from rlax_stack.errors import ConfigError

BASE = """
def source(**changes):
  fields = {
    'kind': 'jsonl',  # jsonl | gsm8k
    'size': 0,  # problems
  }
  return fields


def get_config():
  config = ConfigDict()
  config.seed = 3  # of everything
  config.rollout = ConfigDict()  # how samples are drawn
  config.rollout.slots = 64  # side by side
  # Two lines
  # above it.
  config.rollout.stop = ('#',)
  config.rollout.deep = ConfigDict()
  config.rollout.deep.depth_m = 1.5  # metres
  return config
"""


def test_read_sections():
  run, rollout, source = docs_config.read_sections(BASE)
  assert run.fields == [docs_config.Field('seed', '3', 'of everything')]
  assert (rollout.name, rollout.description) == ('rollout', 'how samples are drawn')
  assert rollout.fields == [
    docs_config.Field('rollout.slots', '64', 'side by side'),
    docs_config.Field('rollout.stop', "('#',)", 'Two lines above it.'),
    docs_config.Field('rollout.deep.depth_m', '1.5', 'metres'),
  ]
  assert source.fields == [
    docs_config.Field('kind', "'jsonl'", 'jsonl | gsm8k'),
    docs_config.Field('size', '0', 'problems'),
  ]


def test_render_escapes_the_bars_of_a_table():
  assert "| `kind` | `'jsonl'` | jsonl \\| gsm8k |" in docs_config.render(BASE)


def test_source_without_get_config():
  with pytest.raises(ConfigError, match='no function get_config'):
    docs_config.read_sections('x = 1')


def test_page_is_up_to_date():
  page = docs_config.render(docs_config.SOURCE.read_text())
  assert docs_config.PAGE.read_text() == page, 'run `make docs`'


def test_every_field_has_a_description():
  sections = docs_config.read_sections(docs_config.SOURCE.read_text())
  assert len(sections) > 5
  assert [f.name for section in sections for f in section.fields if not f.description] == []


def test_every_field_of_the_config_is_on_the_page():
  def names(config, prefix=''):
    for key, value in config.items():
      nested = hasattr(value, 'items') and 'prompt_template' not in value and key != 'verifiers'
      yield from names(value, f'{prefix}{key}.') if nested else [f'{prefix}{key}']

  config = base.get_config()
  page = docs_config.render(docs_config.SOURCE.read_text())
  for name in names(config):
    assert f'`{name}`' in page, name


def test_check_refuses_another_page_and_writes_nothing(tmp_path):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  path = tmp_path / 'page.md'
  docs_config.write_or_check(path, 'one', 'the source')
  with flagsaver.flagsaver(check=True):
    docs_config.write_or_check(path, 'one', 'the source')
    with pytest.raises(ConfigError, match='docs/page.md is not what the source says'):
      docs_config.write_or_check(path, 'two', 'the source')
  assert path.read_text() == 'one'
