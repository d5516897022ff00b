"""`--config=file.py --config.key=value --workdir=…`, parsed by ml_collections and checked by us.

Every mistake at the terminal becomes a ConfigError of one line. No device is touched here.
"""

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from rlax_stack import config_rules
from rlax_stack.config import RunConfig, from_config_dict, nearest
from rlax_stack.errors import ConfigError, RlaxError

DefineFlags = Callable[[flags.FlagValues], None]


def parse(
  argv: Sequence[str], define: DefineFlags | None = None
) -> tuple[RunConfig, flags.FlagValues]:
  """Reads a command line.

  Args:
    argv: the program's name and its arguments.
    define: adds the flags that only this command has.

  Returns:
    The checked config and the values of all flags (`workdir` among them).

  Raises:
    ConfigError: a config file that cannot be read, an unknown flag or field, a value of another
      type, or a combination that config_rules refuses.
  """
  _require_config_file(argv)
  values = flags.FlagValues()
  try:
    config_flags.DEFINE_config_file(
      'config', None, 'The config file.', flag_values=values, lock_config=True, sys_argv=list(argv)
    )
    flags.DEFINE_string('workdir', 'runs', 'Folder of all runs.', flag_values=values)
    if define is not None:
      define(values)
    rest = values(list(argv))[1:]
  except (
    flags.Error,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    OSError,
    SyntaxError,
  ) as error:
    raise ConfigError(_explain(argv, values, error)) from error
  if rest:
    raise ConfigError(f'unexpected argument {rest[0]!r}. Flags are written --name=value.')
  source: Any = values['config'].value  # a ConfigDict: the flag is required and was parsed
  config = from_config_dict(source)
  config_rules.check(config)
  return config, values


def _explain(argv: Sequence[str], values: flags.FlagValues, error: Exception) -> str:
  """What is wrong with the command line, in one line."""
  config = _config_alone(argv)
  for arg in argv[1:]:
    name, _, value = arg.removeprefix('--').partition('=')
    if name.startswith('config.') and config is not None:
      unknown = _unknown_field(config, name.split('.')[1:])
      if unknown:
        return unknown
      if name in str(error):
        return f'{name} cannot be {value!r}: {error}'
    elif arg.startswith('--') and name != 'config' and name not in values:
      return f'unknown flag --{name}.{nearest(name, list(values))}'
  return f'{type(error).__name__}: {error}'


def _config_alone(argv: Sequence[str]) -> ConfigDict | None:
  """The config file without the overrides, or None where the file itself is at fault."""
  alone = [argv[0], *(arg for arg in argv if arg.startswith('--config='))]
  values = flags.FlagValues()
  try:
    config_flags.DEFINE_config_file('config', None, '', flag_values=values, sys_argv=alone)
    values(alone)
  except Exception as error:  # whatever the user's file raises
    logging.debug('the config file fails by itself: %r', error)
    return None
  return values['config'].value


def _require_config_file(argv: Sequence[str]) -> None:
  paths = [arg.split('=', 1)[1] for arg in argv if arg.startswith('--config=')]
  if not paths:
    raise ConfigError('no config was given. Add for example --config=configs/quickstart.py.')
  if not pathlib.Path(paths[-1].split(':')[0]).is_file():
    raise ConfigError(f'there is no config file {paths[-1]!r}. Give for example configs/base.py.')


def _unknown_field(config: ConfigDict, names: Sequence[str]) -> str:
  """What is unknown in a dotted field, or an empty string."""
  at, path = config, 'config'
  for name in names:
    if not isinstance(at, ConfigDict):
      return f'{path} is a value, not a section: it has no field {name!r}.'
    if name not in at:
      return f'unknown field {path}.{name}.{nearest(name, list(at))}'
    at, path = at[name], f'{path}.{name}'
  return ''


def run(main: Callable[[Sequence[str]], int | None]) -> None:
  """Calls a command's main; an error made on purpose is printed in one line, exit status 2."""
  flags.FLAGS.mark_as_parsed()  # absl's logger asks the global flags; ours are our own
  logging.use_absl_handler()
  logging.set_verbosity(logging.WARNING)
  try:
    sys.exit(main(sys.argv) or 0)
  except RlaxError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
