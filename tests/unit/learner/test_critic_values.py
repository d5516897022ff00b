"""The values that a learner's critic gives, and the places of the rows that they are of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner import critic as critics
from rlax_stack.learner import packing
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.scoring import head_log_probs, row_states, target_log_probs
from rlax_stack.types import FinishReason, Reward


@pytest.fixture(scope='module')
def groups(cut_groups):
  return cut_groups


def _score(learner, groups):
  """Values before and after every trained token, by trajectory, as `train` scores them."""
  packed = learner._pack_to_train(groups)[0]
  batch, num_micro = learner._place(packed)
  state = learner.state
  scored = learner._score_values(state.params, state.critic['params'], batch, num_micro)
  flat = [np.asarray(x).reshape(-1, x.shape[-1])[: len(packed.tokens)] for x in scored]
  count = sum(len(g.trajectories) for g in groups)
  return [[x[packed.trajectory_t == i] for x in flat] for i in range(count)]


def _values_of(learner, config, tokens):
  """Value after every token of one sequence, by a row of its own and numpy."""
  length = len(tokens)
  empty = packing.empty_batch(1, RowShape(length, 1))
  rows = empty._replace(
    tokens=np.asarray(tokens, np.int32)[None],
    positions=np.arange(length, dtype=np.int32)[None],
    subtree_end=np.full((1, length), length, np.int32),
  )
  params = learner.state.critic['params']
  trunk = learner.state.params if 'final_norm' not in params else params
  trunk = {name: leaf for name, leaf in trunk.items() if name != 'value_head'}
  config = (
    config if 'final_norm' not in params else dataclasses.replace(config, tie_embeddings=True)
  )
  hidden = np.asarray(row_states(trunk, config, rows, learner._settings.forward), np.float64)[0]
  head = jax.tree.map(np.asarray, params['value_head'])
  return hidden @ head['kernel'][0].astype(np.float64) + head['bias'][0]


@pytest.mark.parametrize('critic', ['separate', 'shared_trunk', 'separate(bootstrap=False)'])
def test_values_are_those_of_each_sequence_alone(critic, tiny, groups, make_critic_learner):
  learner = make_critic_learner(critic)
  scored = iter(_score(learner, groups))
  for group in groups:
    for trajectory in group.trajectories:
      before, after = next(scored)
      alone = _values_of(learner, tiny, trajectory.tokens)
      trained = np.flatnonzero(trajectory.mask_t)
      np.testing.assert_allclose(before, alone[trained - 1], rtol=2e-4, atol=2e-5)
      cut = trajectory.finish_reason != FinishReason.STOP and 'False' not in critic
      want = np.append(alone[trained[1:] - 1], alone[-1] if cut else 0.0)
      np.testing.assert_allclose(after, want, rtol=2e-4, atol=2e-5)


def test_values_skip_observations(tiny, groups, make_critic_learner):
  """The state after a token is where the next trained one is predicted, whatever lies between."""
  trajectory = max((t for g in groups for t in g.trajectories), key=lambda t: t.mask_t.sum())
  mask = trajectory.mask_t.copy()
  mask[[-2, -1]] = False  # ends in an observation
  mask[np.flatnonzero(mask)[1]] = False
  trajectory = dataclasses.replace(trajectory, mask_t=mask, finish_reason=FinishReason.LENGTH)
  home = groups[trajectory.group_id]
  group = dataclasses.replace(home, trajectories=(trajectory, *home.trajectories[1:]))
  learner = make_critic_learner()
  before, after = _score(learner, [group])[0]
  alone, trained = _values_of(learner, tiny, trajectory.tokens), np.flatnonzero(mask)
  np.testing.assert_allclose(before, alone[trained - 1], rtol=2e-4, atol=2e-5)
  want = np.append(alone[trained[1:] - 1], alone[-1])
  np.testing.assert_allclose(after, want, rtol=2e-4, atol=2e-5)


def test_rows_without_a_critic_are_packed_as_ever(groups):
  advantages = [np.zeros(len(g.trajectories)) for g in groups]
  plain, boot = (
    packing.pack_groups(groups, advantages, row_shapes=[RowShape(96, 96)], bootstrap=bootstrap)
    for bootstrap in (False, True)
  )
  cut = sum(t.finish_reason != FinishReason.STOP for g in groups for t in g.trajectories)
  used = [packing.packing_stats(batch)['row_tokens'] for batch in (plain, boot)]
  assert used[1] == used[0] + cut
  goes_on = plain.next_index_t >= 0
  assert goes_on.sum() == plain.mask_t.sum() - sum(len(g.trajectories) for g in groups)
  np.testing.assert_array_equal(
    plain.next_index_t[:, :-1][goes_on[:, :-1]], plain.source_index_t[:, 1:][goes_on[:, :-1]]
  )
  ends = (boot.next_index_t >= 0) & ~goes_on
  assert ends.sum() == cut
  for row, triple in np.argwhere(ends):  # the last token itself
    place = boot.next_index_t[row, triple]
    assert boot.tokens[row, place] == boot.target_t[row, triple]
  np.testing.assert_array_equal(boot.target_t, plain.target_t)


def test_learner_metrics_are_those_of_numpy(tiny, groups, make_critic_learner):
  learner = make_critic_learner(advantage='gae(gamma=0.9, lam=1.0, value_lam=1.0)')
  values, targets = [], []
  for (before, after), trajectory in zip(
    _score(learner, groups), [t for g in groups for t in g.trajectories], strict=True
  ):
    steps = np.arange(len(before) - 1, -1, -1)
    values.append(before)
    targets.append(0.9**steps * (trajectory.reward.value + 0.9 * after[-1]))
  v, t = np.concatenate(values), np.concatenate(targets)
  found = learner.train(groups).result()
  assert found['value_loss'] == pytest.approx(0.5 * np.mean((v - t) ** 2), rel=1e-4)
  assert found['value_mean'] == pytest.approx(v.mean(), rel=1e-4)
  assert found['explained_variance'] == pytest.approx(1 - (t - v).var() / t.var(), rel=1e-3)


def _single(make_groups, seed, rewards):
  """One sample per prompt, each with its own reward."""
  groups = make_groups(seed=seed, sizes=(1,) * len(rewards), prompt_lengths=(4,) * len(rewards))

  def scored(group, reward):
    one = dataclasses.replace(group.trajectories[0], reward=Reward(value=reward))
    return dataclasses.replace(group, trajectories=(one,))

  return [scored(group, reward) for group, reward in zip(groups, rewards, strict=True)]


@pytest.mark.parametrize('critic', ['separate(learning_rate=1e-2)', 'shared_trunk(coef=4.0)'])
def test_critic_learns_the_value_of_every_prompt(critic, make_groups, make_critic_learner):
  rewards = (1.0, 0.0, 0.5, -1.0)
  groups = _single(make_groups, 3, rewards)
  frozen = critic.replace(')', ', pretrain_updates=1000)') if 'separate' in critic else critic
  learner = make_critic_learner(frozen, random_head=False, advantage='gae')
  for _ in range(60):
    found = learner.train(groups).result()
  assert found['explained_variance'] > 0.95
  for (before, after), reward in zip(_score(learner, groups), rewards, strict=True):
    np.testing.assert_allclose(before, reward, atol=0.2)
    assert after[-1] == 0.0


def test_helpers_of_the_step(make_critic_learner):
  """Values before and after are read off the same row; a shared trunk needs the policy's states."""
  value = jnp.array([[1.0, 2.0, 3.0, 4.0]])
  rows = packing.empty_batch(1, RowShape(4, 3))._replace(
    source_index_t=jnp.array([[0, 2, 1]]), next_index_t=jnp.array([[2, -1, 3]])
  )
  np.testing.assert_array_equal(critics.values_before(value, rows), [[1.0, 3.0, 2.0]])
  np.testing.assert_array_equal(critics.values_after(value, rows), [[3.0, 0.0, 4.0]])
  learner = make_critic_learner('shared_trunk')
  settings = learner._critic
  with pytest.raises(ValueError, match='hidden states of the policy'):
    critics.row_values(settings, {}, None, None, rows, None)
  assert critics.make_state(None, learner._settings.optimizer)({}) == {}
  fresh = critics.init_params(settings, learner.params)
  assert critics.taken_over(fresh, fresh, 'itself').keys() == fresh.keys()


def test_scores_are_those_of_the_parts_of_the_step(tiny, groups, make_critic_learner):
  learner = make_critic_learner()
  batch, num_micro = learner._place(learner._pack_to_train(groups)[0])
  state, forward = learner.state, learner._settings.forward
  score = critics.make_value_score(tiny, learner._mesh, forward, learner._critic)
  found = score(state.params, state.critic['params'], batch, num_micro)
  rows = jax.tree.map(lambda x: x[0], batch)
  value = critics.row_values(learner._critic, state.critic['params'], None, tiny, rows, forward)
  np.testing.assert_allclose(found[0][0], critics.values_before(value, rows), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found[1][0], critics.values_after(value, rows), rtol=1e-5, atol=1e-6)
  hidden = row_states(state.params, tiny, rows, forward)
  two = head_log_probs(state.params, tiny, hidden, rows, forward)
  one = target_log_probs(state.params, tiny, rows, forward)
  np.testing.assert_array_equal(one.log_prob, two.log_prob)
