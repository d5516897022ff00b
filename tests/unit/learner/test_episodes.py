"""Episodes of several turns, agents and rewards of steps go through packing and the learner.

They are built by hand: two agents who take turns after one prompt, the environment between them.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.reward_batch import from_groups
from rlax_stack.types import Group, Prompt, Reward, Source

_ROLES = ('x', 'o', 'x')


def _episode(rng, trajectory, index):
  """Three turns of 2, 1 and 2 tokens after the prompt's own, an observation between them."""
  prompt = int((trajectory.source_t == Source.PROMPT).sum())
  source = [Source.PROMPT] * prompt + [1, 1, 2, 1, 2, 2, 1, 1]
  tokens = np.concatenate([trajectory.tokens[:prompt], rng.integers(0, 64, 8)]).astype(np.int32)
  source = np.array(source, np.int8)
  sampled = source == Source.POLICY
  log_probs = np.where(sampled, -rng.exponential(2.0, len(tokens)), 0.0).astype(np.float32)
  steps = tuple(float(value) for value in rng.integers(-2, 3, 3) / 2)
  return dataclasses.replace(
    trajectory,
    sample_index=index,
    tokens=tokens,
    source_t=source,
    mask_t=sampled,
    behaviour_log_probs_t=log_probs,
    raw_log_probs_t=log_probs,
    version_t=np.where(sampled, 0, -1).astype(np.int32),
    reward=Reward(value=sum(steps) + float(rng.integers(2)), step_values=steps),
    roles=_ROLES,
  )


@pytest.fixture
def make_episodes(make_groups):
  """Function (seed) -> two groups of three episodes."""

  def make(seed=0):
    rng = np.random.default_rng(seed)
    return [
      Group(
        group_id=group.group_id,
        prompt=Prompt(
          prompt_id=group.prompt.prompt_id, messages=(), answer='', metadata={'task': 'game'}
        ),
        prompt_tokens=group.prompt_tokens,
        trajectories=tuple(_episode(rng, t, i) for i, t in enumerate(group.trajectories)),
      )
      for group in make_groups(seed=seed, sizes=(3, 3), prompt_lengths=(4, 2))
    ]

  return make


@pytest.mark.parametrize(
  'text', ['agent_turn_std', 'step_std', 'role_baseline', 'reinforce_pp(kl_coef=0)']
)
def test_each_token_trains_with_the_advantage_of_its_turn(text, make_learner, make_episodes):
  """REINFORCE on policy: the loss is −Σ A log π / N with the host's advantages at their tokens."""
  groups = make_episodes()
  objective = resolve(advantage=text, trust_region='reinforce', corrections=())
  learner = make_learner(objective=objective)
  scores = [s[t.mask_t] for g, of in zip(groups, learner.score(groups), strict=True)
            for t, s in zip(g.trajectories, of, strict=True)]  # fmt: skip
  batch = from_groups(groups)
  if 'reinforce_pp' in text:
    batch = dataclasses.replace(batch, log_probs_t=tuple(scores), anchor_log_probs_t=tuple(scores))
  found = advantages_of(objective, batch)
  assert any(len(set(values.tolist())) > 1 for values in found.adv_t)
  total = sum(float(a @ s) for a, s in zip(found.adv_t, scores, strict=True))
  loss = learner.train(groups).result()['loss']
  assert loss == pytest.approx(-total / sum(map(len, scores)), rel=1e-4, abs=1e-6)
  assert learner.host_state == found.state


def test_a_resumed_learner_goes_on_from_the_same_baselines(tmp_path, make_learner, make_episodes):
  objective = resolve(advantage='role_baseline(decay=0.9)')
  whole, cut = make_learner(objective=objective), make_learner(objective=objective)
  for seed in range(2):
    whole.train(make_episodes(seed))
    cut.train(make_episodes(seed))
  assert set(whole.host_state['advantage']['game']) == {'x', 'o'}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(2, cut.state, {'objective': cut.host_state})
  checkpointer.close()
  again, checkpointer = make_learner(objective=objective), Checkpointer(tmp_path)
  assert again.host_state == {'advantage': {}}
  restored = checkpointer.restore_latest(again.abstract_state())
  checkpointer.close()
  again.restore(restored.state, restored.extras['objective'])
  assert again.host_state == whole.host_state
  for seed in (2, 3):
    want, got = whole.train(make_episodes(seed)).result(), again.train(make_episodes(seed)).result()
    assert want == got
  jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
  assert json.loads(json.dumps(again.host_state)) == whole.host_state
  # Without its baselines the same learner does something else.
  lost = make_learner(objective=objective)
  lost.restore(jax.tree.map(lambda x: x.copy(), again.state))
  assert lost.host_state == {'advantage': {}}
  assert lost.train(make_episodes(4)).result()['loss'] != pytest.approx(
    again.train(make_episodes(4)).result()['loss'], rel=1e-3
  )


def test_a_greedy_sample_is_compared_with_and_not_trained_on(make_learner, make_groups):
  groups = make_groups()
  objective = resolve(advantage='greedy_baseline', trust_region='reinforce', corrections=())
  greedy = [
    dataclasses.replace(g.trajectories[0], sample_index=99, reward=Reward(value=float(i)))
    for i, g in enumerate(groups)
  ]
  both = [dataclasses.replace(g, greedy=t) for g, t in zip(groups, greedy, strict=True)]
  learner = make_learner(objective=objective)
  total = tokens = 0.0
  for index, (group, of_group) in enumerate(zip(groups, learner.score(groups), strict=True)):
    for t, score in zip(group.trajectories, of_group, strict=True):
      total += (t.reward.value - index) * float(score.sum())
      tokens += t.mask_t.sum()
  found = learner.train(both).result()
  assert found['trained_tokens'] == tokens
  assert found['loss'] == pytest.approx(-total / tokens, rel=1e-4)
