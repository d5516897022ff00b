"""A toy task that a tiny random model really learns: answer each question with its one right word."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.decoder import init_params
from rlax_stack.models.hf import save_hf
from rlax_stack.models.tokenizer import Tokenizer

ROOT = pathlib.Path(__file__).parents[2]
WORDS = ('red', 'green', 'blue', 'one', 'two', 'three', 'sky', 'grass', 'rose', 'sun')
PAIRS = (('sky', 'blue'), ('grass', 'green'), ('rose', 'red'), ('sun', 'one'))
TEMPLATE = (
  '{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}: {% endif %}'
)


@pytest.fixture(scope='session')
def toy(tmp_path_factory):
  """A folder with a model directory `model` and the tasks `train.jsonl` and `eval.jsonl`."""
  folder = tmp_path_factory.mktemp('toy')
  vocabulary = {word: i for i, word in enumerate(('<end>', '<unk>', ':', *WORDS))}
  backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
  backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(['<end>'])
  config = ModelConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_context=64,
  )
  save_hf(
    folder / 'model',
    config,
    init_params(config, jax.random.key(0)),
    tokenizer=Tokenizer(backend, eos_id=0, chat_template=TEMPLATE),
  )
  for name, prefix in (('train', ''), ('eval', 'the ')):
    lines = [json.dumps({'question': f'{prefix}{q}', 'answer': a}) for q, a in PAIRS]
    (folder / f'{name}.jsonl').write_text('\n'.join(lines) + '\n')
  return folder


@pytest.fixture(scope='session')
def toy_arguments(toy):
  """Makes the flags of the toy run for a workdir."""
  return lambda workdir: _arguments(toy, workdir)


@pytest.fixture
def launch(toy_arguments, tmp_path):
  """Runs the command line in a process of its own; returns its CompletedProcess or its Popen."""

  def start(*changes, module='launch', wait=True, timeout_s=240.0):
    changed = {change.partition('=')[0] for change in changes}  # a tuple given twice is joined
    kept = [flag for flag in toy_arguments(tmp_path) if flag.partition('=')[0] not in changed]
    command = [sys.executable, '-m', f'rlax_stack.{module}', *kept, *changes]
    environment = dict(os.environ, JAX_PLATFORMS='cpu', XLA_FLAGS='', JAX_COMPILATION_CACHE_DIR='')
    options = {'cwd': ROOT, 'env': environment, 'text': True, 'stderr': subprocess.STDOUT}
    if wait:
      return subprocess.run(command, stdout=subprocess.PIPE, timeout=timeout_s, **options)
    return subprocess.Popen(command, stdout=subprocess.PIPE, **options)

  return start


def _arguments(toy, workdir):
  """Flags of the toy run."""
  fields = {
    'name': 'toy',
    'model.path': toy / 'model',
    'data.train.kind': 'jsonl',
    'data.train.path': toy / 'train.jsonl',
    'data.train.size': 0,
    'data.eval.kind': 'jsonl',
    'data.eval.path': toy / 'eval.jsonl',
    'data.eval.size': 0,
    'rollout.groups_per_step': 4,
    'rollout.group_size': 16,
    'rollout.max_prompt_tokens': 8,
    'rollout.max_tokens': 2,
    'rollout.stop_strings': '("red","green","blue","one")',
    'learner.learning_rate': 0.01,
    'eval.samples': 8,
    'steps': 30,
    'checkpoint.every_steps': 5,
    'eval.every_steps': 0,
    'observe.progress': 'plain',
    'observe.report': False,
    'observe.tensorboard': False,
  }
  flags = [f'--config.{name}={value}' for name, value in fields.items()]
  return ['--config=tests/integration/toy_config.py', f'--workdir={workdir}', *flags]
