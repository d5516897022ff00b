"""What each feature of the learner costs: a step with it over a step without, taken in turn in the same run.

  python -m benchmarks.learner_features

A feature is what a user would put on the command line, on top of a plain config (GRPO, AdamW in float32, no remat); a
step is `Learner.train` until its metrics are there, packing included. The two learners take turns, so that a change of
the machine's pace meets both. Random weights of SmolLM2-135M's shape, 8 groups of 8 samples, 64 prompt and 64 sampled
tokens. The last line is JSON: mean seconds of a step with each feature and of plain ones, their ratio, and the first
step, which compiles.
"""

from rlax_stack import huge_pages

if __name__ == '__main__':  # before anything large is imported
  huge_pages.restart_with_huge_pages()

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from benchmarks.batches import Workload, make_groups
from configs import base
from rlax_stack import assembly
from rlax_stack.config import from_config_dict
from rlax_stack.learner.learner import Learner
from rlax_stack.learner.precision import COMPUTE_DTYPES, resolve_compute_dtype
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.shapes import SHAPES
from rlax_stack.sharding import make_mesh
from rlax_stack.types import Group, Reward

FEATURES: dict[str, Mapping[str, Any]] = {
  'plain again': {},
  'remat layer': {'learner.remat': 'layer'},
  'remat attention': {'learner.remat': 'attention'},
  'remat dots': {'learner.remat': 'dots'},
  'remat dots_attention': {'learner.remat': 'dots_attention'},
  'muon': {'learner.optimizer': 'muon'},
  'adafactor': {'learner.optimizer': 'adafactor'},
  'lion': {'learner.optimizer': 'lion'},
  'sgd': {'learner.optimizer': 'sgd'},
  'schedule_free': {'learner.optimizer': 'schedule_free'},
  'bfloat16 moments': {'learner.optimizer_dtype': 'bfloat16'},
  'bfloat16 gradient sum': {'learner.gradient_dtype': 'bfloat16'},
  'LoRA': {'learner.adapter.kind': 'lora'},
  'DoRA': {'learner.adapter.kind': 'dora'},
  'MiSS': {'learner.adapter.kind': 'miss'},
  'LoRA on int8': {'learner.adapter.kind': 'lora', 'learner.adapter.base': 'int8'},
  'LoRA on int4': {'learner.adapter.kind': 'lora', 'learner.adapter.base': 'int4'},
  'anchor': {'objective.regularisers': ('kl_anchor(coef=0.001)',)},
  'two updates': {'learner.updates_per_batch': 2},
  'averaged weights': {'objective.ratio': 'token(base="ema", decay=0.9)'},
  'critic on the policy': {'objective.advantage': 'gae()', 'objective.critic': 'shared_trunk'},
  'critic of its own': {'objective.advantage': 'gae()', 'objective.critic': 'separate'},
}

_FEATURES = flags.DEFINE_list('features', list(FEATURES), 'which of them')
_LAYERS = flags.DEFINE_integer(
  'layers', 30, 'layers of the model; fewer are quicker', lower_bound=1
)
_REPEATS = flags.DEFINE_integer('repeats', 3, 'measured steps of each; their mean counts')
_DTYPE = flags.DEFINE_enum('compute_dtype', 'auto', COMPUTE_DTYPES, 'of activations')

WORK = Workload(groups=8, group_size=8, prompt_tokens=64, sampled_tokens=64)


def settings_with(feature: Mapping[str, Any], work: Workload, dtype: Any) -> Any:
  """LearnerSettings of the base config, sized for `work`, with a feature's config values."""
  config = base.get_config()
  config.rollout.groups_per_step, config.rollout.group_size = work.groups, work.group_size
  config.rollout.max_prompt_tokens, config.rollout.max_tokens = (
    work.prompt_tokens,
    work.sampled_tokens,
  )
  config.learner.learning_rate = 1e-6
  with config.unlocked():
    config.update_from_flattened_dict(dict(feature))
  return assembly.learner_settings(from_config_dict(config), dtype)


def scored_groups(config: ModelConfig, work: Workload) -> list[Group]:
  """Groups of random tokens with random rewards."""
  rng = np.random.default_rng(1)

  def scored(trajectory: Any) -> Any:
    return dataclasses.replace(trajectory, reward=Reward(value=float(rng.normal())))

  return [
    dataclasses.replace(group, trajectories=tuple(map(scored, group.trajectories)))
    for group in make_groups(config, work)
  ]


def step_seconds(learner: Learner, groups: list[Group]) -> float:
  """One step, until its metrics are on the host."""
  start = time.perf_counter()
  learner.train(groups).result()
  jax.block_until_ready(learner.params)
  return time.perf_counter() - start


def ratio_to_plain(
  config: ModelConfig,
  params: Any,
  feature: Mapping[str, Any],
  work: Workload,
  dtype: Any,
  repeats: int,
) -> dict[str, float]:
  """Mean seconds of a plain step and of one with the feature, and their ratio."""
  mesh, groups = make_mesh({}, jax.devices()[:1]), scored_groups(config, work)
  plain, other = (
    Learner(config, params, settings_with(each, work, dtype), mesh) for each in ({}, feature)
  )
  times = np.asarray(
    [[step_seconds(learner, groups) for learner in (plain, other)] for _ in range(repeats + 1)]
  )
  means = times[1:].mean(0)  # the first one compiles
  return {
    'plain_s': float(means[0]),
    'step_s': float(means[1]),
    'ratio': float(means[1] / means[0]),
    'first_s': float(times[0, 1]),
  }


def main(argv):
  """Prints a table and one line of JSON."""
  del argv
  unknown = [name for name in _FEATURES.value if name not in FEATURES]
  if unknown:
    raise app.UsageError(f'unknown features {unknown}. Choose from: {", ".join(FEATURES)}.')
  dtype = resolve_compute_dtype(_DTYPE.value)
  config = dataclasses.replace(SHAPES['smollm2_135m'], num_layers=_LAYERS.value)
  params = jax.tree.map(np.asarray, decoder.init_params(config, jax.random.key(0)))
  results = {}
  print(f'{"feature":24s}{"ratio":>8s}{"step s":>9s}{"plain s":>9s}{"first s":>9s}')
  for name in _FEATURES.value:
    found = ratio_to_plain(config, params, FEATURES[name], WORK, dtype, _REPEATS.value)
    results[name] = {key: round(value, 3) for key, value in found.items()}
    row = ''.join(f'{found[key]:9.2f}' for key in ('step_s', 'plain_s', 'first_s'))
    print(f'{name:24s}{found["ratio"]:8.2f}{row}', flush=True)
    logging.info('%s: %s', name, results[name])
    jax.clear_caches()
  print(
    json.dumps(
      {
        'benchmark': 'learner_features',
        'dtype': np.dtype(dtype).name,
        'layers': config.num_layers,
        **results,
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
