"""The benchmark of features: every one is an option that changes the learner, and a step with it trains."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.batches import Workload
from benchmarks.features import FEATURES, ratio_to_plain, scored_groups, settings_with
from rlax_stack.models import decoder
from rlax_stack.models.shapes import SHAPES

WORK = Workload(groups=2, group_size=2, prompt_tokens=3, sampled_tokens=2)


def test_every_feature_changes_the_settings_in_its_own_way():
  found = {name: settings_with(flags, WORK, jnp.float32) for name, flags in FEATURES.items()}
  assert found.pop('plain again') == (plain := settings_with({}, WORK, jnp.float32))
  assert plain not in found.values()
  assert len(set(found.values())) == len(found)


def test_steps_of_both_are_timed():
  small = {'num_layers': 1, 'vocab_size': 32, 'hidden_size': 8, 'intermediate_size': 8}
  heads = {'num_heads': 2, 'num_kv_heads': 1, 'head_dim': 4}
  config = dataclasses.replace(SHAPES['smollm2_135m'], **small, **heads)
  params = decoder.init_params(config, jax.random.key(0))
  rewards = [t.reward.value for g in scored_groups(config, WORK) for t in g.trajectories]
  assert len(set(rewards)) == 4
  found = ratio_to_plain(config, params, FEATURES['lion'], WORK, jnp.float32, repeats=1)
  assert found['ratio'] == pytest.approx(found['step_s'] / found['plain_s'])
  assert found['first_s'] > found['step_s'] > 0
