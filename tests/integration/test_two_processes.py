"""The learner in two real processes: the same numbers as in one, one checkpoint, and no hang when one is killed."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name('learner_process.py')

pytestmark = pytest.mark.slow


def _start(folder, devices, *arguments):
  flags = f'--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0'
  with (folder / f'{arguments[0]}.log').open('w') as log:
    return subprocess.Popen(
      [sys.executable, PROGRAM, folder, *arguments],
      cwd=ROOT,
      env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
      stdout=log,
      stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope='module')
def reports(tmp_path_factory):
  """What process 0, process 1 and one process alone saw, and their exit codes."""
  folder = tmp_path_factory.mktemp('processes')
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  started = {who: _start(folder, 4, who, address) for who in ('0', '1')}
  started['alone'] = _start(folder, 8, 'alone')
  try:
    codes = {'0': started['0'].wait(timeout=100)}
    outlived_s = time.time() - (folder / '1.json').stat().st_mtime
    codes |= {who: process.wait(timeout=100) for who, process in started.items()}
  finally:
    for process in started.values():
      process.kill()
  logs = {who: (folder / f'{who}.log').read_text()[-3000:] for who in started}
  assert all((folder / f'{who}.json').exists() for who in started), logs
  found = {who: json.loads((folder / f'{who}.json').read_text()) for who in started}
  found['0']['outlived_s'] = outlived_s
  return found, codes, folder


def test_two_processes_train_as_one(reports):
  found, _, _ = reports
  for who in ('0', '1'):
    for got, want in zip(found[who]['metrics'], found['alone']['metrics'], strict=True):
      for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(found[who]['scores'], found['alone']['scores'], rtol=2e-5)
    np.testing.assert_allclose(found[who]['weights'], found['alone']['weights'], rtol=2e-5)
  assert found['0']['metrics'] == found['1']['metrics']
  assert found['alone']['metrics'][0]['grad_norm'] != found['alone']['metrics'][1]['grad_norm']


def test_each_process_needs_its_own_rows_alone(reports):
  assert all(reports[0][who]['own_rows'] for who in ('0', '1'))


def test_both_write_one_checkpoint(reports):
  found, _, folder = reports
  assert all(found[who]['restored'] for who in ('0', '1'))
  assert [path.name for path in (folder / 'checkpoints').iterdir()] == ['2']


def test_batches_that_differ_are_refused_by_both(reports):
  for who, other in (('0', '1'), ('1', '0')):
    refused = reports[0][who]['other_batch']
    assert f'process {other} has another batch than process {who}' in refused['error']
    assert refused['after_s'] < 5


def test_a_process_that_comes_late_is_named(reports):
  late = reports[0]['0']['late']
  assert 'batch 2: process 1 of 2 did not come within 5 s' in late['error']
  assert 5 <= late['after_s'] < 15


def test_a_process_killed_in_a_step_ends_the_other_which_names_it(reports):
  found, codes, folder = reports
  assert codes['1'] == -signal.SIGKILL
  assert codes['alone'] == 0
  # The collective fails, and `train` with it, or hangs, and the watch ends the process.
  said = found['0'].get('alone', {}).get('error') or (folder / '0.log').read_text()
  assert 'process 1 of 2 gave no sign of life for 10 s. Look at its log' in said
  assert codes['0'] != 0 or 'alone' in found['0']
  assert found['0']['outlived_s'] < 40
