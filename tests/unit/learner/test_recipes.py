"""Every recipe takes two real optimizer steps on a decoder of one layer."""

import dataclasses
import importlib
import pathlib
import re

import jax
import numpy as np
import pytest

from rlax_stack.config import from_config_dict
from rlax_stack.config_rules import check
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.teacher import Teacher
from rlax_stack.models import decoder
from rlax_stack.objective_rules import resolve_objective
from rlax_stack.types import Reward

_ROOT = pathlib.Path(__file__).parents[3]
_NAMES = sorted(p.stem for p in (_ROOT / 'configs' / 'recipes').glob('*.py') if p.stem[0] != '_')
# Each recipe compiles a program of its own: a few stand for all in the quick tier.
_QUICK = ('dapo', 'grpo', 'gspo')
RECIPES = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _NAMES]


@pytest.fixture(scope='module')
def make_small(tiny, make_learner):
  """Function (objective, updates_per_batch) -> a learner of one layer."""
  config = dataclasses.replace(tiny, num_layers=1, vocab_size=32, hidden_size=8, head_dim=4)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: (0.4 * rng.standard_normal(leaf.shape) + 0.2).astype(np.float32),
    decoder.abstract_params(config),
  )
  plan = RowPlan(shape=RowShape(32, 32), micro_batch_rows=1, max_micro_batches=2)
  return lambda objective, updates: make_learner(
    config=config,
    params=params,
    objective=objective,
    rows=plan,
    updates_per_batch=updates,
    teacher=Teacher(config, jax.tree.map(lambda x: 1.1 * x, params)),
  )


@pytest.fixture(scope='module')
def groups(make_groups):
  """Two groups, of rewards 0 and 1/2, and 0, 1/3 and 2/3."""
  groups = make_groups(sizes=(2, 3), prompt_lengths=(3, 2))

  def small(trajectory, size):
    reward = Reward(value=trajectory.reward.value / size)
    return dataclasses.replace(trajectory, tokens=trajectory.tokens % 32, reward=reward)

  return [
    dataclasses.replace(
      group,
      prompt_tokens=group.prompt_tokens % 32,
      trajectories=tuple(small(t, len(group.trajectories)) for t in group.trajectories),
      greedy=dataclasses.replace(
        small(group.trajectories[0], 1), reward=Reward(value=0.25), sample_index=9
      ),
    )
    for group in groups
  ]


def _as_sampled(learner, groups):
  """The groups with the log-probs that the learner's weights give, and a little noise."""
  rng = np.random.default_rng(0)
  return [
    dataclasses.replace(
      group,
      trajectories=tuple(
        dataclasses.replace(
          t, behaviour_log_probs_t=(s + 0.05 * rng.standard_normal(s.shape)).astype(np.float32)
        )
        for t, s in zip(group.trajectories, scores, strict=True)
      ),
    )
    for group, scores in zip(groups, learner.score(groups), strict=True)
  ]


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_takes_two_steps(name, make_small, groups):
  source = importlib.import_module(f'configs.recipes.{name}').get_config()
  source.rollout.max_tokens = 8
  # Two steps: the first may be the critic's, the second is the policy's too.
  source.objective.critic = re.sub(
    r'pretrain_updates=\d+', 'pretrain_updates=1', source.objective.critic
  )
  config = from_config_dict(source)
  check(config)
  updates = config.learner.updates_per_batch
  learner = make_small(resolve_objective(config), updates)
  if config.rollout.group_size == 1:
    groups = [dataclasses.replace(g, trajectories=g.trajectories[-1:]) for g in groups]
  sampled, before = _as_sampled(learner, groups), learner.snapshot()
  learner.train(sampled)
  found = learner.train(sampled).result()
  assert all(np.isfinite(value) for value in found.values()), found
  assert found['skipped'] == 0.0 and int(learner.state.step) == 2 * updates
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), learner.snapshot(), before)
  assert max(jax.tree.leaves(moved)) > 0
