"""The real google-jetstream 0.2.2: its driver and gRPC server run JetStreamEngine and JetStreamTokenizer."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]

# What JetStream takes from seqio, which would bring TensorFlow: names in annotations, never called here.
_SEQIO = 'class Vocabulary: ...\nclass SentencePieceVocabulary(Vocabulary): ...\n'

needs_jetstream = pytest.mark.skipif(
  importlib.util.find_spec('jetstream') is None,
  reason='not installed: pip install --no-deps google-jetstream==0.2.2 shortuuid tiktoken regex',
)


@pytest.fixture(scope='module')
def run_program(tmp_path_factory):
  """Runs Python with the stand-in for seqio, in a process that it may kill."""
  folder = tmp_path_factory.mktemp('stand_in')
  (folder / 'seqio').mkdir()
  (folder / 'seqio' / '__init__.py').touch()
  (folder / 'seqio' / 'vocabularies.py').write_text(_SEQIO)

  def run(*arguments):
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get('PYTHONPATH', '')])
    environment = {**os.environ, 'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'}
    return subprocess.run(
      [sys.executable, *map(str, arguments)],
      env=environment,
      capture_output=True,
      text=True,
      timeout=200,
    )

  return run


@pytest.mark.slow
@needs_jetstream
def test_its_driver_and_its_server_run_our_engine(run_program, long_model):
  done = run_program(pathlib.Path(__file__).with_name('jetstream_program.py'), long_model)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['live'] == [True, True]
  # Twelve requests on four slots, tokens in and tokens out, each cut at its own max_tokens.
  assert found['tokens'] == found['want']
  assert max(map(len, found['want'])) == 34
  tokens, text = found['by_text']
  assert tokens == found['want'][9] and text
  assert found['too_long'] == 2  # cut to its end by JetStream, answered all the same


@needs_jetstream
def test_sizes_that_jetstream_cannot_pad_to_are_refused(run_program):
  code = (
    'from rlax_stack.serving.jetstream_adapter import EngineConfig, JetStreamEngine\n'
    'JetStreamEngine(None, sizes=EngineConfig(max_prompt_tokens=100), weights=None,'
    ' tokenizer=None, sampling=None)'
  )
  done = run_program('-c', code)
  assert 'powers of two from 16 on, but max_prompt_tokens=100' in done.stderr


def test_without_the_package_it_says_what_to_install(run_program):
  block = 'import sys; sys.modules["jetstream"] = None\n'
  done = run_program('-c', f'{block}import rlax_stack.serving.jetstream_adapter')
  assert "Run: pip install 'rlax-stack[jetstream]'" in done.stderr
