"""Every strategy from prompt to gradient: what the engine sampled is what the learner trains."""

import dataclasses

import numpy as np
import pytest

from rlax_stack import assembly, command_line, sources
from rlax_stack.fleet.local_runtime import LocalRuntime
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.types import Source

_STRATEGIES = {
  'tree(roots=2, rounds=2)': 'tree_nodes',
  'tree(roots=2, by="spread", trains="roots")': 'vine',
  'tree(roots=2, rounds=2, by="attention", distance=2)': 'tree_nodes',
  'prefix(guided=0.5, fractions=(0.5,), field="question")': 'start_std',
  'delethink(chunk=4, carry=2)': 'group_std',
}


@pytest.fixture(scope='module')
def model(toy_arguments):
  config = command_line.parse(['launch', *toy_arguments('unused')])[0]
  return assembly.load_checked_model(config, {})


@pytest.fixture(params=_STRATEGIES)
def config(request, toy_arguments):
  flags = [flag for flag in toy_arguments('unused') if 'stop_strings' not in flag]
  changes = (
    f'--config.rollout.strategy={request.param}',
    f'--config.objective.advantage={_STRATEGIES[request.param]}',
    '--config.model.compute_dtype=float32',
    '--config.rollout.max_tokens=10',
    '--config.rollout.group_size=6',
    '--config.rollout.groups_per_step=2',
  )
  return command_line.parse(['launch', *flags, *changes])[0]


@pytest.mark.slow
def test_engine_and_learner_agree_and_the_batch_is_trained(config, model):
  prompts, server = assembly.make_prompts(config), ParameterServer()
  learner = assembly.make_learner(config, model)
  coordinator = assembly.make_coordinator(config, prompts.iterator)
  with sources.make_chain(config.rewards) as chain:
    worker = assembly.make_worker(config, model, chain)
    with LocalRuntime(worker, coordinator=coordinator, parameter_server=server):
      server.publish(0, learner.snapshot(), copy=False)
      coordinator.on_published(0)
      groups = coordinator.next_batch(0, timeout_s=120.0)
    held_out = assembly.held_out_groups(
      config,
      model,
      chain,
      prompts.held_out,
      lambda requests: worker.generate_all(requests, server.latest()),
    )
  gaps = [
    np.abs(trajectory.behaviour_log_probs_t - score)[trajectory.mask_t]
    for group, scores in zip(groups, learner.score(groups), strict=True)
    for trajectory, score in zip(group.trajectories, scores, strict=True)
  ]
  assert max(gap.max(initial=0.0) for gap in gaps) <= 1e-4
  # Rewards of a random model are mostly 0: these make every advantage speak.
  rng = np.random.default_rng(0)
  groups = [
    dataclasses.replace(
      group,
      trajectories=tuple(
        dataclasses.replace(t, reward=dataclasses.replace(t.reward, value=float(rng.random())))
        for t in group.trajectories
      ),
    )
    for group in groups
  ]
  found = learner.train(groups).result()
  assert all(np.isfinite(value) for value in found.values()) and found['skipped'] == 0.0
  assert found['grad_norm'] > 0
  assert found['targets'] == sum(int(t.mask_t.sum()) for g in groups for t in g.trajectories)
  assert len(held_out) == len(prompts.held_out)
  for group in held_out:
    assert len(group.trajectories) == config.eval.samples
    for trajectory in group.trajectories:
      assert trajectory.branch is None and 1 <= trajectory.num_sampled <= 10
      chunked = 'delethink' in config.rollout.strategy and trajectory.num_sampled > 4
      assert bool(trajectory.context_starts) == chunked
      assert chunked or not (trajectory.source_t == Source.GUIDE).any()
