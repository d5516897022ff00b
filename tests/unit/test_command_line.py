"""Mistakes at the terminal: one line that names the field, the value and the cure."""

import sys

import pytest
from absl import flags

from rlax_stack import command_line
from rlax_stack.errors import ConfigError

QUICKSTART = '--config=configs/quickstart.py'


def test_overrides_reach_the_frozen_config():
  config, values = command_line.parse(
    [
      'launch',
      QUICKSTART,
      '--config.steps=7',
      '--config.rollout.stop_strings=("a","b")',
      '--workdir=w',
    ]
  )
  assert config.steps == 7
  assert config.rollout.stop_strings == ('a', 'b')
  assert values['workdir'].value == 'w'


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--config.rollout.temprature=1', r'config.rollout.temprature. Did you mean temperature\?'),
    ('--config.rolout.temperature=1', r'config.rolout. Did you mean rollout\?'),
    ('--config.steps.more=1', 'config.steps is a value, not a section'),
    ('--config.steps=many', "config.steps cannot be 'many'"),
    ('--config.observe.report=maybe', "config.observe.report cannot be 'maybe'"),
    ('--config.learner.decay=cosin', r'learner.decay must be one of .* Did you mean cosine\?'),
    ('--wrokdir=x', r'unknown flag --wrokdir. Did you mean workdir\?'),
    ('stray', "unexpected argument 'stray'"),
  ],
)
def test_mistakes_are_explained(argument, message):
  with pytest.raises(ConfigError, match=message):
    command_line.parse(['launch', QUICKSTART, argument])


def test_missing_config_is_explained():
  with pytest.raises(ConfigError, match='no config was given'):
    command_line.parse(['launch'])
  with pytest.raises(ConfigError, match='no config was given'):
    command_line.parse(['launch', '--config.steps=3'])
  with pytest.raises(ConfigError, match="no config file 'configs/nope.py'"):
    command_line.parse(['launch', '--config=configs/nope.py'])


def test_a_command_adds_its_own_flags():
  def define(values):
    flags.DEFINE_integer('extra', 3, 'More.', flag_values=values)

  _, values = command_line.parse(['evaluate', QUICKSTART, '--extra=5'], define)
  assert values['extra'].value == 5


def test_run_prints_one_line_and_exits_2(monkeypatch, capsys):
  def main(argv):
    raise ConfigError('broken. Mend it.')

  monkeypatch.setattr(sys, 'argv', ['x'])
  with pytest.raises(SystemExit) as exit_info:
    command_line.run(main)
  assert exit_info.value.code == 2
  assert capsys.readouterr().err == 'error: broken. Mend it.\n'
