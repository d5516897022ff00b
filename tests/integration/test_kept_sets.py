"""Kept sets from the engine to the gradient: the learner scores what the sampler drew from."""

import dataclasses
import json

import numpy as np
import pytest

from rlax_stack import assembly, command_line, sources
from rlax_stack.fleet.local_runtime import LocalRuntime
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.train_loop import batch_metrics
from rlax_stack.types import KEPT_OVERFLOW, Source

_FILTERS = {
  'top_k': ('--config.rollout.top_k=4', '--config.rollout.kept_tokens=4'),
  'top_p': ('--config.rollout.top_p=0.7', '--config.rollout.kept_tokens=16'),
  'all': (
    '--config.rollout.top_p=0.8',
    '--config.rollout.top_k=10',
    '--config.rollout.min_p=0.02',
    '--config.rollout.kept_tokens=12',
    '--config.rollout.temperature=0.7',
    '--config.rollout.strategy=delethink(chunk=4, carry=2)',
  ),
  'short': (
    '--config.rollout.top_p=0.5',
    '--config.rollout.temperature=0.7',
    '--config.rollout.kept_tokens=7',
  ),
}


@pytest.fixture(params=_FILTERS)
def config(request, toy_arguments):
  flags = [flag for flag in toy_arguments('unused') if 'stop_strings' not in flag]
  changes = (
    *_FILTERS[request.param],
    '--config.objective.ratio=token(base="behaviour")',
    '--config.objective.corrections=()',
    '--config.model.compute_dtype=float32',
    '--config.rollout.max_tokens=8',
    '--config.rollout.group_size=6',
    '--config.rollout.groups_per_step=2',
    '--config.fleet.max_staleness=1',
  )
  return command_line.parse(['launch', *flags, *changes])[0]


def _drawn(config, model, learner):
  """One batch of the run, as the worker delivers it."""
  prompts, server = assembly.make_prompts(config), ParameterServer()
  coordinator = assembly.make_coordinator(config, prompts.iterator)
  with sources.make_chain(config.rewards) as chain:
    worker = assembly.make_worker(config, model, chain)
    with LocalRuntime(worker, coordinator=coordinator, parameter_server=server):
      server.publish(0, learner.snapshot(), copy=False)
      coordinator.on_published(0)
      return coordinator.next_batch(0, timeout_s=120.0)


def _changed(groups, change):
  return [
    dataclasses.replace(g, trajectories=tuple(change(t) for t in g.trajectories)) for g in groups
  ]


def _gaps(learner, groups):
  return np.concatenate(
    [
      np.abs(trajectory.behaviour_log_probs_t - score)[trajectory.mask_t]
      for group, scores in zip(groups, learner.score(groups), strict=True)
      for trajectory, score in zip(group.trajectories, scores, strict=True)
    ]
  )


@pytest.mark.slow
def test_sampler_and_learner_agree_within_the_sets_alone(config, toy):
  model = assembly.load_checked_model(config, {})
  learner = assembly.make_learner(config, model)
  groups = _drawn(config, model, learner)
  trajectories = [t for group in groups for t in group.trajectories]
  assert _gaps(learner, groups).max() <= 1e-4
  bare = _changed(groups, lambda t: dataclasses.replace(t, kept_ids_t=None))
  assert _gaps(learner, bare).mean() > 0.1
  # What has no set is not trained on, and told.
  overflows = [t.kept_ids_t[:, 0] == KEPT_OVERFLOW for t in trajectories]
  for trajectory, overflow in zip(trajectories, overflows, strict=True):
    policy = trajectory.source_t == Source.POLICY
    np.testing.assert_array_equal(trajectory.mask_t, policy & ~overflow)
  share = sum(o.sum() for o in overflows) / sum(t.num_sampled for t in trajectories)
  assert batch_metrics(groups, 1.0)['rollout/kept_overflow_share'] == pytest.approx(share)
  assert 'rollout/kept_overflow_share' not in batch_metrics(bare, 1.0)
  assert (share > 0) == (config.rollout.kept_tokens == 7)
  rng = np.random.default_rng(0)
  groups = _changed(
    groups,
    lambda t: dataclasses.replace(t, reward=dataclasses.replace(t.reward, value=rng.random())),
  )
  found = learner.train(groups).result()
  assert found['ratio_mean'] == pytest.approx(1, abs=1e-4) and found['skipped'] == 0
  assert found['grad_norm'] > 0
  assert found['targets'] == sum(int(t.mask_t.sum()) for t in trajectories)


@pytest.mark.slow
def test_a_filtered_run_with_stale_samples_learns(launch, tmp_path):
  done = launch(
    '--config.rollout.top_p=0.9',
    '--config.rollout.kept_tokens=16',
    '--config.fleet.max_staleness=1',
  )
  assert done.returncode == 0, done.stdout
  lines = (tmp_path / 'toy' / 'metrics.jsonl').read_text().splitlines()
  steps = [line for line in map(json.loads, lines) if 'reward/mean' in line]
  rewards = [line['reward/mean'] for line in steps]
  assert len(rewards) == 30 and np.mean(rewards[-3:]) > 0.9 > 0.4 > np.mean(rewards[:3])
  assert all(line['rollout/kept_overflow_share'] == 0 for line in steps)
  assert max(line['fleet/staleness'] for line in steps) > 0
  # Samples of the learner's own weights are as likely to it as to the sampler.
  assert all(line['train/sampler_log_ratio_max'] < 0.05 for line in steps)
  assert all(line['perf/compilations'] == 0 for line in steps)
