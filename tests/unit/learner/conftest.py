"""A tiny decoder and batches of made-up trajectories for the learner's tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner.learner import Learner
from rlax_stack.learner.optimizer import OptimizerSettings
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings
from rlax_stack.learner.settings import LearnerSettings
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.objective import resolve
from rlax_stack.sharding import make_mesh
from rlax_stack.types import FinishReason, Group, Prompt, Reward, Source, Trajectory

GAE = 'gae(gamma=0.9, lam=0.8, value_lam=0.9)'


def _trajectory(rng, config, group_id, index, prompt, length, reward):
  tokens = np.concatenate([prompt, rng.integers(0, config.vocab_size, length)]).astype(np.int32)
  sampled = np.arange(len(tokens)) >= len(prompt)
  log_probs = np.where(sampled, -rng.exponential(3.0, len(tokens)), 0.0).astype(np.float32)
  return Trajectory(
    group_id=group_id,
    sample_index=index,
    prompt_id=f'p{group_id}',
    tokens=tokens,
    source_t=np.where(sampled, Source.POLICY, Source.PROMPT).astype(np.int8),
    mask_t=sampled,
    behaviour_log_probs_t=log_probs,
    raw_log_probs_t=log_probs,
    version_t=np.where(sampled, 0, -1).astype(np.int32),
    finish_reason=FinishReason.STOP,
    reward=Reward(value=float(reward)),
  )


def _groups(config, seed=0, sizes=(3, 2, 4), prompt_lengths=(5, 3, 8)):
  rng = np.random.default_rng(seed)
  groups = []
  for group_id, (size, prompt_length) in enumerate(zip(sizes, prompt_lengths, strict=True)):
    prompt = rng.integers(0, config.vocab_size, prompt_length).astype(np.int32)
    rewards = rng.permutation(size)
    trajectories = tuple(
      _trajectory(rng, config, group_id, i, prompt, int(rng.integers(2, 8)), rewards[i])
      for i in range(size)
    )
    task = Prompt(prompt_id=f'p{group_id}', messages=(), answer='')
    groups.append(
      Group(group_id=group_id, prompt=task, prompt_tokens=prompt, trajectories=trajectories)
    )
  return groups


@pytest.fixture(scope='session')
def tiny():
  """Config of a decoder whose every dimension divides by 2."""
  return ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
  )


@pytest.fixture(scope='session')
def tiny_params(tiny):
  """Float32 parameters, drawn without compiling anything; distributions are peaked."""
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    if path[-1].key == 'scale':
      return np.ones(leaf.shape, np.float32)
    return (0.4 * rng.standard_normal(leaf.shape)).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(tiny))


@pytest.fixture(scope='session')
def make_groups(tiny):
  """Function (seed, sizes, prompt_lengths) -> ragged groups with rewards 0, 1, 2, ..."""
  return lambda **kwargs: _groups(tiny, **kwargs)


@pytest.fixture(scope='session')
def settings():
  """Float32 settings: one micro-batch of four rows of 48 tokens."""
  return LearnerSettings(
    rows=RowPlan(shape=RowShape(48, 48), micro_batch_rows=4, max_micro_batches=2),
    forward=ForwardSettings(compute_dtype=jnp.float32),
    objective=resolve(corrections=()),
    optimizer=OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9),
  )


@pytest.fixture(scope='session')
def make_learner(tiny, tiny_params, settings):
  """Function (mesh sizes, teacher, other context, replaced LearnerSettings fields) -> a fresh Learner."""

  def make(mesh=None, params=None, config=tiny, teacher=None, other_context=None, **replace):
    sizes = mesh or {}
    count = int(np.prod(list(sizes.values()) or [1]))
    return Learner(
      config,
      tiny_params if params is None else params,
      dataclasses.replace(settings, **replace),
      make_mesh(sizes, jax.devices()[:count]),
      teacher=teacher,
      other_context=other_context,
    )

  return make


def _cut_off(groups):
  """The first trajectory of every group was cut off, the second aborted."""
  reasons = (FinishReason.LENGTH, FinishReason.ABORT)

  def one(group):
    cut = [
      dataclasses.replace(t, finish_reason=reason)
      for t, reason in zip(group.trajectories, reasons, strict=False)
    ]
    return dataclasses.replace(group, trajectories=(*cut, *group.trajectories[2:]))

  return [one(group) for group in groups]


def _randomised(learner, seed=0, scale=0.3):
  """Gives the learner a value head that says something."""
  rng = np.random.default_rng(seed)
  state = learner.state
  head = jax.tree.map(
    lambda x: jax.device_put((scale * rng.standard_normal(x.shape)).astype(np.float32), x.sharding),
    state.critic['params']['value_head'],
  )
  params = state.critic['params'] | {'value_head': head}
  learner.restore(state._replace(critic=state.critic | {'params': params}))
  return learner


@pytest.fixture(scope='session')
def cut_groups(make_groups):
  """The groups of `make_groups`; in each the first trajectory was cut off, the second aborted."""
  return _cut_off(make_groups())


@pytest.fixture(scope='session')
def make_critic_learner(make_learner):
  """Function (critic, random_head, advantage, boxes, LearnerSettings fields) -> Learner."""

  def make(critic='separate', *, random_head=True, advantage=GAE, boxes=None, **fields):
    objective = resolve(critic=critic, advantage=advantage, corrections=(), **(boxes or {}))
    learner = make_learner(objective=objective, **fields)
    return _randomised(learner) if random_head else learner

  return make
