"""The features of the learner as config values, and what a step with one costs beside a plain one."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.batches import Workload, make_groups
from configs import base
from rlax_stack import assembly
from rlax_stack.config import from_config_dict
from rlax_stack.learner.learner import Learner
from rlax_stack.models.config import ModelConfig
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
