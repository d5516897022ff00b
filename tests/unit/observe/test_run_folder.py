"""A run folder belongs to one config and one process at a time."""

import json
import subprocess
import sys

import pytest

from rlax_stack.errors import CheckpointError
from rlax_stack.observe.run_folder import RunFolder, config_differences, format_differences

CONFIG = {'seed': 0, 'optimizer': {'learning_rate': 1e-5, 'name': 'adamw'}, 'num_steps': 100}


def changed(**values):
  return CONFIG | values


@pytest.fixture
def folder(tmp_path):
  folder = RunFolder(tmp_path / 'runs', 'first')
  yield folder
  folder.close()


def test_create_makes_everything_and_is_repeatable(folder):
  assert folder.create(CONFIG) is False
  assert json.loads(folder.config_path.read_text()) == CONFIG
  for path in (folder.samples_dir, folder.tensorboard_dir, folder.report_dir):
    assert path.is_dir()
  folder.close()
  assert folder.create(CONFIG) is True


def test_another_config_is_refused_with_a_readable_diff(folder):
  folder.create(CONFIG)
  other = changed(optimizer={'learning_rate': 3e-5, 'name': 'adamw'}, extra=[1])
  with pytest.raises(CheckpointError) as caught:
    folder.create(other)
  message = str(caught.value)
  assert '  optimizer.learning_rate  1e-05 -> 3e-05' in message
  assert '  extra                    (absent) -> [1]' in message
  assert 'seed' not in message
  assert '--workdir' in message and '--config.resume=force' in message
  assert json.loads(folder.config_path.read_text()) == CONFIG


def test_free_keys_may_differ(folder):
  folder.create(CONFIG)
  other = changed(num_steps=200, optimizer={'learning_rate': 1.0, 'name': 'sgd'})
  assert folder.create(other, free_keys={'num_steps', 'optimizer'}) is True
  assert json.loads(folder.config_path.read_text()) == other


def test_allowed_changes_keep_the_old_config(folder):
  folder.create(CONFIG)
  folder.create(changed(seed=1), allow_changes=True)
  folder.create(changed(seed=2), allow_changes=True)
  seeds = [
    json.loads((folder.path / name).read_text())['seed']
    for name in ('config.1.json', 'config.2.json', 'config.json')
  ]
  assert seeds == [0, 1, 2]


def test_differences_tell_types_apart_and_formats_align():
  differences = config_differences({'a': 1, 'b': True, 'c': 'x'}, {'a': 1.0, 'b': 1, 'c': 'x'})
  assert differences == {'a': (1, 1.0), 'b': (True, 1)}
  text = format_differences({'a': (1, 2), 'long': ('x', '\x1b')})
  assert text == '  a     1 -> 2\n  long  "x" -> "\\u001b"'
  assert config_differences({'ab': 1}, {'ab': 2}, free_keys={'a'}) == {'ab': (1, 2)}


@pytest.mark.parametrize('name', ['', '.', '..', 'a/b', 'a\0b'])
def test_bad_names_are_refused(tmp_path, name):
  with pytest.raises(CheckpointError, match='plain folder name'):
    RunFolder(tmp_path, name)


def test_a_torn_config_is_refused(folder):
  folder.create(CONFIG)
  folder.config_path.write_text('{"seed"')
  with pytest.raises(CheckpointError, match='is not JSON'):
    folder.create(CONFIG)


def test_a_run_without_config_is_refused(folder):
  folder.path.mkdir(parents=True)
  folder.metrics_path.write_text('')
  with pytest.raises(CheckpointError, match='without config.json'):
    folder.create(CONFIG)


def test_a_file_in_the_way_is_a_clear_error(tmp_path):
  (tmp_path / 'runs').write_text('')
  with pytest.raises(CheckpointError, match='writable --workdir'):
    RunFolder(tmp_path / 'runs', 'x').create(CONFIG)


def test_a_second_process_is_refused_until_the_first_is_gone(folder):
  code = (
    'import sys\n'
    'from rlax_stack.observe.run_folder import RunFolder\n'
    "RunFolder(sys.argv[1], 'first').create({'seed': 0})\n"
    "print('held', flush=True)\n"
    'sys.stdin.read()\n'
  )
  child = subprocess.Popen(
    [sys.executable, '-c', code, str(folder.path.parent)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with child:
    assert child.stdout.readline() == 'held\n'
    with pytest.raises(CheckpointError, match='another process is using'):
      folder.create({'seed': 0})
    child.kill()
    child.wait()
  assert folder.create({'seed': 0}) is True
