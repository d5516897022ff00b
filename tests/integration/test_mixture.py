"""A mixture of experts from its folder through sampling, scoring and training."""

import dataclasses

import jax
import numpy as np
import pytest

from rlax_stack import assembly, command_line, sources
from rlax_stack.models import decoder
from rlax_stack.models.hf import save_hf
from rlax_stack.models.load import load_model
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.trajectory import make_trajectory
from rlax_stack.types import Group, Reward


@pytest.fixture(scope='module')
def config(toy, toy_arguments, tmp_path_factory):
  """The toy run, of a mixture."""
  dense = load_model(toy / 'model')
  mixture = dataclasses.replace(
    dense.config, num_experts=4, experts_per_token=2, moe_intermediate_size=64
  )
  folder = tmp_path_factory.mktemp('mixture') / 'model'
  params = decoder.init_params(mixture, jax.random.key(1))
  save_hf(folder, mixture, params, tokenizer=dense.tokenizer)
  flags = [flag for flag in toy_arguments('unused') if 'model.path' not in flag]
  more = (
    f'--config.model.path={folder}',
    '--config.model.compute_dtype=float32',
    '--config.rollout.max_tokens=6',
    '--config.rollout.stop_strings=()',
    '--config.learner.router_aux_coef=0.01',
    '--config.learner.router_z_coef=0.001',
    '--config.rollout.router_replay=True',
  )
  return command_line.parse(['launch', *flags, *more])[0]


def _free(trajectory):
  return dataclasses.replace(trajectory, experts_t=None)


def test_engine_log_probs_equal_the_learners_and_training_measures_the_router(config):
  prompts = assembly.make_prompts(config)
  model = assembly.load_checked_model(config, {'train': prompts.train})
  learner, scheduler = assembly.make_learner(config, model), assembly.make_scheduler(config, model)
  scheduler.swap_params(learner.snapshot(), 0)
  sampling = sources.train_sampling(config, model.tokenizer.stop_token_ids)
  groups = []
  for group_id in range(4):
    prompt = prompts.iterator.next()
    tokens = model.tokenizer.encode_chat(prompt.messages)
    requests = [
      GenerationRequest(group_id=group_id, sample_index=i, prompt_tokens=tokens, sampling=sampling)
      for i in range(8)
    ]
    drawn = tuple(
      make_trajectory(sample, prompt_id=prompt.prompt_id, text='', reward=Reward(value=i % 2.0))
      for i, sample in enumerate(scheduler.generate_all(requests))
    )
    groups.append(Group(group_id=group_id, prompt=prompt, prompt_tokens=tokens, trajectories=drawn))
  free = [dataclasses.replace(g, trajectories=tuple(map(_free, g.trajectories))) for g in groups]
  for some in (groups, free):
    for group, scores in zip(some, learner.score(some), strict=True):
      for trajectory, score in zip(group.trajectories, scores, strict=True):
        gap = np.abs(score - trajectory.behaviour_log_probs_t)[trajectory.mask_t]
        assert gap.max() <= 1e-4
  drawn = [trajectory for group in groups for trajectory in group.trajectories]
  assert all((t.experts_t[:-1] >= 0).all() and (t.experts_t < 4).all() for t in drawn)
  metrics = learner.train(groups).result()
  assert metrics['router_strayed'] <= 0.01  # weights are those of the rollout
  assert 1 <= metrics['expert_load_max'] <= 4 and 0 <= metrics['expert_load_min'] <= 1
  assert 0 < metrics['router_entropy'] <= np.log(4)
  assert metrics['router_aux'] > 0 and metrics['skipped'] == 0
