"""A run that trains an adapter, as launch runs it: it learns, goes on, and is exported."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from rlax_stack import assembly, command_line
from rlax_stack import launch as launcher
from rlax_stack.errors import CheckpointError, ConfigError
from rlax_stack.export import export
from rlax_stack.learner.checkpoint import load_checkpoint_extras, load_checkpoint_params
from rlax_stack.models.hf import save_hf
from rlax_stack.models.load import load_model
from rlax_stack.observe.run_folder import RunFolder
from rlax_stack.trained_weights import trained_adapter, trained_weights

ADAPTER = {
  'kind': 'lora',
  'rank': 8,
  'alpha': 16,
  'targets': "('*_proj/kernel',)",
}


@pytest.fixture
def run(toy, toy_arguments, tmp_path, monkeypatch):
  """Function (flags) that trains in this process; the model's head is large enough to say something frozen."""
  model = load_model(toy / 'model')
  embedding = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
  params = model.params | {'embedder': {'embedding': 0.25 * embedding}}
  save_hf(tmp_path / 'model', model.config, params, tokenizer=model.tokenizer)
  monkeypatch.setattr(launcher, 'enable_compile_cache', lambda: None)

  def train(*flags, **adapter):
    made = [f'--config.learner.adapter.{k}={v}' for k, v in (ADAPTER | adapter).items()]
    path = f'--config.model.path={tmp_path / "model"}'
    regularisers = '--config.objective.regularisers=("kl_anchor(coef=0.001)",)'
    fixed = (path, regularisers, '--config.model.compute_dtype=float32')
    argv = ['launch', *toy_arguments(tmp_path), *fixed, *made, *flags]
    config, _ = command_line.parse(argv)
    return launcher.train(config, RunFolder(str(tmp_path), config.name), command=argv[1:])

  return train


@pytest.mark.slow
def test_an_adapter_learns_resumes_and_is_exported_merged(run, tmp_path, capsys):
  assert run('--config.steps=12') == 0
  assert run('--config.steps=18') == 0
  assert 'resumed at step 12' in capsys.readouterr().out
  folder = tmp_path / 'toy'
  lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  lines = [line for line in lines if 'reward/mean' in line]
  rewards = [line['reward/mean'] for line in lines]
  assert np.mean(rewards[:3]) < 0.3 and np.mean(rewards[-3:]) > 0.8, rewards
  assert max(line['perf/compilations'] for line in lines) == 0.0
  # Of the same tokens under the same weights: merged in the engine, beside them in the learner.
  assert max(line['train/sampler_log_ratio_max'] for line in lines) <= 1e-4

  saved = load_checkpoint_params(folder / 'checkpoints')
  names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(saved)}
  assert names == {'lora_a', 'lora_b'}
  assert load_checkpoint_extras(folder / 'checkpoints', 18)['adapter']['rank'] == 8
  model = load_model(tmp_path / 'model')
  merged = trained_weights(folder / 'checkpoints', lambda: model.params)
  export(run=str(folder), out=str(tmp_path / 'merged'))
  jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / 'merged').params, merged)
  export(run=str(folder), out=str(tmp_path / 'adapter'), adapter=True)
  assert json.loads((tmp_path / 'adapter' / 'adapter_config.json').read_text())['r'] == 8
  other = model.params | {'final_norm': {'scale': model.params['final_norm']['scale'] + 1}}
  with pytest.raises(CheckpointError, match='adapter of other weights: base_sum is'):
    trained_weights(folder / 'checkpoints', lambda: other)
  settings, tree, _ = trained_adapter(folder / 'checkpoints', 18)
  assert settings.kind == 'lora'
  jax.tree.map(np.testing.assert_array_equal, tree, saved)
  with pytest.raises(
    CheckpointError, match='adapter of other weights: alpha is 16.0 there and 8.0'
  ):
    run('--config.steps=19', '--config.checkpoint.allow_changes=True', alpha=8)


def test_the_weights_that_learner_and_worker_share(toy, toy_arguments, tmp_path):
  flags = ('--config.learner.adapter.kind=dora', '--config.learner.adapter.base=int8')
  config, _ = command_line.parse(['launch', *toy_arguments(tmp_path), *flags, '--config.seed=3'])
  model = load_model(toy / 'model')
  shared = assembly.with_frozen_weights(config, model)
  assert shared.params['layers']['q_proj']['kernel'].values.dtype == np.int8
  settings = assembly.adapter_settings(config)
  assert (settings.kind, settings.base, settings.seed) == ('dora', 'int8', 3)
  with pytest.raises(ConfigError, match='rank=17 exceeds .* 16 x 32'):
    assembly.with_frozen_weights(_with_adapter(config, rank=17), model)
  with pytest.raises(ConfigError, match='matches no kernel of this model'):
    assembly.with_frozen_weights(_with_adapter(config, targets=('*experts*',)), model)
  plain = _with_adapter(config, kind='none')
  assert assembly.with_frozen_weights(plain, model) is model
  assert assembly.adapter_settings(plain) is None


def _with_adapter(config, **changes):
  adapter = dataclasses.replace(config.learner.adapter, **changes)
  return dataclasses.replace(config, learner=dataclasses.replace(config.learner, adapter=adapter))
