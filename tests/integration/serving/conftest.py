"""A served toy model with a long context, in this process: serving/endpoint.py's Endpoint, made by the command."""

import asyncio
import contextlib
import dataclasses
import threading
import types

import jax
import pytest
import tokenizers

from rlax_stack import command_line, serve
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.decoder import init_params
from rlax_stack.models.hf import save_hf
from rlax_stack.models.tokenizer import Tokenizer

SLOTS, MAX_WAITING = 4, 6
WORDS = 'the sky sun rose grass red green blue one two three cat dog'
VOCABULARY = {word: i for i, word in enumerate(('<end>', '<unk>', ':', *WORDS.split()))}
TEMPLATE = """{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages -%}
{{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.arguments.to }} {% endfor %}{% endfor -%}
{% if add_generation_prompt %}: {% endif %}"""


@pytest.fixture(scope='session')
def long_model(tmp_path_factory):
  """A model directory with a word for every token and room for answers that take a while."""
  folder = tmp_path_factory.mktemp('long') / 'model'
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token='<unk>'))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(['<end>'])
  tokenizer = Tokenizer(backend, eos_id=0, chat_template=TEMPLATE)
  config = ModelConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_context=8192,
  )
  save_hf(folder, config, init_params(config, jax.random.key(0)), tokenizer=tokenizer)
  return folder


@pytest.fixture(scope='session')
def serve_config(toy_arguments, long_model):
  """The checked config of a served toy model; `changes` are flags."""

  def make(*changes):
    fields = {
      'model.path': long_model,
      'rollout.max_prompt_tokens': 32,
      'rollout.max_tokens': 8000,
      'model.compute_dtype': 'float32',
      'rollout.slots': SLOTS,
      'serve.port': 0,
      'serve.max_waiting': MAX_WAITING,
      'serve.max_body_bytes': 4096,
      'serve.io_timeout_s': 0.5,
      'serve.request_timeout_s': 60.0,
    }
    flags = [f'--config.{name}={value}' for name, value in fields.items()]
    config = command_line.parse(['serve', *toy_arguments('unused'), *flags, *changes])[0]
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, stop_strings=()))

  return make


@contextlib.contextmanager
def running(config, prepare=lambda endpoint: None, **arguments):
  """Runs an endpoint in a thread, after `prepare(endpoint)`; yields it with its address."""
  endpoint, version = serve.make_endpoint(
    config, **{'checkpoint': None, 'token': None, **arguments}
  )
  prepare(endpoint)
  ports, errors = [], []
  up = threading.Event()

  def ready(port):
    ports.append(port)
    up.set()

  def run():
    try:
      asyncio.run(endpoint.run(ready))
    except Exception as error:
      errors.append(error)
    finally:
      up.set()

  thread = threading.Thread(target=run)
  thread.start()
  try:
    assert up.wait(60) and ports, errors
    yield types.SimpleNamespace(
      endpoint=endpoint,
      bridge=endpoint.bridge,
      version=version,
      port=ports[0],
      url=f'http://127.0.0.1:{ports[0]}/v1',
      errors=errors,
      thread=thread,
    )
  finally:
    endpoint.stop()
    thread.join(30)
  assert not thread.is_alive()


@pytest.fixture(scope='session')
def run_endpoint():
  """The context manager above."""
  return running


@pytest.fixture(scope='session')
def server(serve_config):
  """One endpoint for all tests that leave it as it was."""
  with running(serve_config()) as found:
    yield found


@pytest.fixture(scope='session')
def replaced():
  """A section of a config with other values."""

  def change(config, **values):
    return dataclasses.replace(config, serve=dataclasses.replace(config.serve, **values))

  return change
