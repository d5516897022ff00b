"""The command: weights of a checkpoint, newer ones while it serves, the signal that ends it, and its mistakes."""

import asyncio
import builtins
import contextlib
import json
import re
import signal
import socket
import threading

import httpx2 as httpx
import jax
import pytest

from rlax_stack import assembly, serve
from rlax_stack.errors import CheckpointError, ConfigError
from rlax_stack.learner.checkpoint import Checkpointer, newest_step

BODY = {'prompt': 'sky', 'max_tokens': 12, 'stop_token_ids': [], 'seed': 1}


@pytest.fixture(scope='module')
def run_folder(serve_config, tmp_path_factory):
  """A run's folder with checkpoints 3 and, after `more`, 5, of other weights each."""
  config = serve_config('--config.rollout.max_tokens=32', '--config.rollout.max_prompt_tokens=8')
  learner = assembly.make_learner(config, assembly.load_checked_model(config, {}))
  folder = tmp_path_factory.mktemp('runs') / 'toy'
  checkpointer = Checkpointer(folder / 'checkpoints', keep=2, asynchronous=False)

  def save(step, scale):
    state = learner.state
    params = jax.tree.map(lambda x: x if x.ndim < 2 else x * scale, state.params)
    checkpointer.save(step, state._replace(params=params), {})

  save(3, 3.0)
  yield folder, lambda: save(5, 5.0)
  checkpointer.close()


def test_newer_checkpoints_are_taken_while_serving(
  run_folder, serve_config, replaced, run_endpoint
):
  folder, more = run_folder
  directory = serve.checkpoint_directory(str(folder))
  assert directory == serve.checkpoint_directory(str(directory)) and newest_step(directory) == 3
  config = replaced(serve_config(), follow_s=0.05)
  with run_endpoint(config, checkpoint=str(folder)) as server, following(server, directory):
    assert server.version == 3

    def tokens():
      choice = httpx.post(f'{server.url}/completions', json=BODY, timeout=30).json()['choices'][0]
      return choice['versions'], choice['token_ids']

    before = tokens()
    assert before[0] == [3] * 12
    # A request that is running while the weights change says so, token by token.
    versions = []
    long = {**BODY, 'max_tokens': 8000, 'stream': True}
    with httpx.stream('POST', f'{server.url}/completions', json=long, timeout=60) as events:
      for line in events.iter_lines():
        if line.startswith('data: {'):
          versions += json.loads(line[6:])['choices'][0]['versions']
          if set(versions) == {3} and newest_step(directory) == 3:
            more()
        if 5 in versions:
          break
    assert versions == sorted(versions) and set(versions) == {3, 5}
    after = tokens()
    assert after[0] == [5] * 12 and after[1] != before[1]


@contextlib.contextmanager
def following(server, directory):
  async def follow():
    task = asyncio.ensure_future(
      serve.follow_checkpoints(
        server.bridge, directory, server.version, load_model_params=dict, every_s=0.05
      )
    )
    await asyncio.to_thread(stop.wait)
    task.cancel()

  stop = threading.Event()
  thread = threading.Thread(target=lambda: asyncio.run(follow()))
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(launch):
  process = launch('--config.serve.port=0', module='serve', wait=False)
  try:
    line = process.stdout.readline()
    url = re.fullmatch(r'Serving toy \(version 0\) on (http://127\.0\.0\.1:\d+/v1)\n', line)
    assert url, line + process.stdout.read()
    choice = httpx.post(f'{url[1]}/completions', json={'prompt': 'sky'}, timeout=30).json()[
      'choices'
    ][0]
    assert 1 <= len(choice['token_ids']) <= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0 and process.stdout.read() == ''
  finally:
    process.kill()
    process.communicate()


def test_mistakes_are_told_before_anything_is_compiled(serve_config, replaced, monkeypatch):
  def make(checkpoint=None, **values):
    serve.make_endpoint(replaced(serve_config(), **values), checkpoint=checkpoint, token=None)

  with pytest.raises(ConfigError, match='host=0.0.0.0 can be reached'):
    make(host='0.0.0.0')
  with pytest.raises(CheckpointError, match='no checkpoints in'):
    make(checkpoint='no/such/folder')
  with pytest.raises(ConfigError, match='follow_s follows a run'):
    make(follow_s=1.0)
  real = builtins.__import__

  def missing(name, *rest):
    if name.startswith('uvicorn') or rest[2:] and 'endpoint' in (rest[2] or ()):
      raise ModuleNotFoundError("No module named 'uvicorn'", name='uvicorn')
    return real(name, *rest)

  monkeypatch.setattr(builtins, '__import__', missing)
  with pytest.raises(ConfigError, match=r"package uvicorn. Run: pip install 'rlax-stack\[serve\]'"):
    make()


def test_a_taken_port_is_told(serve_config, replaced):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f'port={port}: Address already in use'):
      serve.make_endpoint(replaced(serve_config(), port=port), checkpoint=None, token=None)
