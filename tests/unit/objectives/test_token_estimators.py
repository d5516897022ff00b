"""Estimators whose advantages differ by token, or weigh by tokens, against a second way: plain loops.

A name in a test that is also a recipe's holds the boxes of that recipe.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives import loss
from rlax_stack.objectives.advantages.branches import prefix_tree
from rlax_stack.objectives.advantages.flat_groups import entropy_of_flat_groups, flat_entropy
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.inputs import clean
from rlax_stack.objectives.objective import resolve

_REWARDS, _GROUP, _LENGTH = [1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1], [3, 4, 3, 2]


@pytest.fixture(scope='module')
def batch(make_reward_batch):
  return make_reward_batch(_REWARDS, _GROUP, _LENGTH)


def _of(text, batch):
  """The advantage of each trained token, one list per trajectory."""
  return [values.tolist() for values in advantages_of(resolve(advantage=text), batch).adv_t]


def _close(got, want, **tolerance):
  for some, other in zip(got, want, strict=True):
    np.testing.assert_allclose(some, other, **({'rtol': 1e-5, 'atol': 1e-6} | tolerance))


def _whitened(rows):
  tokens = [x for row in rows for x in row]
  mean = sum(tokens) / len(tokens)
  deviation = math.sqrt(sum((x - mean) ** 2 for x in tokens) / len(tokens))
  return [[(x - mean) / deviation for x in row] for row in rows]


def test_reinforce_pp(batch):
  # Without KL every token of a trajectory has its reward to go.
  want = _whitened([[r] * n for r, n in zip(_REWARDS, _LENGTH, strict=True)])
  _close(_of('reinforce_pp(kl_coef=0)', batch), want)
  reference = [0.92847669, -1.29986737, 0.92847669, -0.18569534]
  np.testing.assert_allclose([row[0] for row in want], reference, rtol=1e-6)
  rng = np.random.default_rng(0)
  current, anchor = ([-rng.exponential(1, n) for n in _LENGTH] for _ in range(2))
  scored = dataclasses.replace(batch, log_probs_t=tuple(current), anchor_log_probs_t=tuple(anchor))
  rows = []
  for reward, ours, start in zip(_REWARDS, current, anchor, strict=True):
    values = [-0.1 * (a - b) for a, b in zip(ours, start, strict=True)]
    values[-1] += reward
    count = range(len(values))
    rows.append([sum(0.9 ** (s - t) * values[s] for s in count if s >= t) for t in count])
  _close(_of('reinforce_pp(gamma=0.9, kl_coef=0.1)', scored), _whitened(rows))
  with pytest.raises(ValueError, match='Score it first'):
    _of('reinforce_pp', dataclasses.replace(batch, log_probs_t=None))


def test_reinforce_pp_baseline(batch):
  want = _whitened([[a] * n for a, n in zip([0.5, -0.5, 0.25, -0.25], _LENGTH, strict=True)])
  _close(_of('reinforce_pp_baseline', batch), want)
  reference = [1.25788651, -1.15725559, 0.65410099, -0.55347007]
  np.testing.assert_allclose([row[0] for row in want], reference, rtol=1e-6)


def test_equal_rewards_say_nothing(make_reward_batch):
  equal = make_reward_batch([0.1] * 3, [0] * 3)
  for name in ('reinforce_pp(kl_coef=0)', 'reinforce_pp_baseline', 'task_standardised'):
    assert not np.any(_of(name, equal)), name


def test_task_standardised(make_reward_batch):
  rewards, group = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.0], [0, 0, 0, 1, 1, 2, 2, 2]
  length, tasks = (
    [3, 8, 1, 2, 5, 4, 4, 6],
    ['sum', 'sum', 'sum', 'game', 'game', 'sum', 'sum', 'sum'],
  )
  metadata = [{'task': task, 'role': 'only'} for task in tasks]
  batch = make_reward_batch(rewards, group, length, metadata=metadata)
  grpo = [row[0] for row in _of('group_std', batch)]
  want = [0.0] * 8
  for task in ('sum', 'game'):
    member = [i for i in range(8) if tasks[i] == task]
    tokens = [grpo[i] for i in member for _ in range(length[i])]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1))
    for i in member:
      want[i] = (grpo[i] - mean) / (deviation + 1e-6)
  got = _of('task_standardised', batch)
  _close(got, [[value] * n for value, n in zip(want, length, strict=True)])
  # Prompts without the key are one task, as those of one role are.
  _close(_of('task_standardised(key="absent")', batch), _of('task_standardised(key="role")', batch))
  assert abs(got[3][0] - _of('task_standardised(key="role")', batch)[3][0]) > 0.1


def test_prefix_tree(make_reward_batch):
  tokens = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 2], [9, 9]]
  rewards = [1.0, 0.0, 0.5, 0.0, 0.0]
  batch = make_reward_batch(rewards, [0] * 5, [len(t) for t in tokens], tokens=tokens)

  def value(prefix):
    return np.mean([r for t, r in zip(tokens, rewards, strict=True) if t[: len(prefix)] == prefix])

  want = [
    [
      (r - np.mean(rewards) + value(t[: i + 1]) - value(t[:i])) / (np.std(rewards, ddof=1) + 1e-6)
      for i in range(len(t))
    ]
    for t, r in zip(tokens, rewards, strict=True)
  ]
  _close(_of('prefix_tree', batch), want)
  _close(prefix_tree(batch, eps=1e-6), want)
  # Samples that differ from the first token on are GRPO's but for that token.
  apart = make_reward_batch([1.0, 0.0], [0, 0], [3, 2], tokens=[[1, 2, 3], [4, 5]])
  _close(
    [row[1:] for row in _of('prefix_tree', apart)], [row[1:] for row in _of('group_std', apart)]
  )


def test_prefix_tree_gives_nothing_to_tokens_that_are_not_trained(make_reward_batch):
  tokens = [[1, 2, 3], [1, 5, 3], [1, 5, 4]]
  batch = make_reward_batch([1.0, 0.0, 0.5], [0] * 3, [3] * 3, tokens=tokens)
  masked = tuple(
    dataclasses.replace(t, mask_t=t.mask_t & (np.arange(4) != 2)) for t in batch.trajectories
  )
  fewer = dataclasses.replace(batch, trajectories=masked, length=np.array([2, 2, 2]))
  whole, got = _of('prefix_tree', batch), _of('prefix_tree', fewer)
  _close(got, [[row[0], row[2]] for row in whole])


def _lens(rewards, total, length):
  """LENS for one group, step by step as its section 5 has it."""
  size = len(rewards)
  mean_probability = [math.exp(t / n) for t, n in zip(total, length, strict=True)]
  difficulty = 2 * max(mean_probability)
  if any(rewards):
    terms = [r / math.exp(t) for r, t in zip(rewards, total, strict=True)]
    difficulty = max(1 / (sum(terms) / size), difficulty)
  calibrated = [
    r - (1 - r) * p / (difficulty - p) / size
    for r, p in zip(rewards, mean_probability, strict=True)
  ]
  mean = sum(calibrated) / size
  deviation = math.sqrt(sum((c - mean) ** 2 for c in calibrated) / (size - 1)) + 1e-6
  return [(c - mean) / deviation if any(rewards) else 0.25 * (c - mean) for c in calibrated]


def test_calibrated_confidence(make_reward_batch):
  groups = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0], [1.0, 1.0]]
  tokens = [[1, 2], [3, 3, 3], [6], [1], [0, 5], [6, 6, 6], [0], [4, 4], [1, 2, 3], [5]]
  length = [len(t) for t in tokens]
  batch = make_reward_batch(
    [r for group in groups for r in group],
    np.repeat(range(4), [len(g) for g in groups]),
    length,
    tokens=tokens,
  )
  total = [sum(-0.2 - 0.1 * x for x in t) for t in tokens]
  want, place = [], 0
  for rewards in groups:
    part = slice(place, place + len(rewards))
    place += len(rewards)
    flat = min(rewards) == 1
    want += [0.0] * len(rewards) if flat else _lens(rewards, total[part], length[part])
  got = [row[0] for row in _of('calibrated_confidence', batch)]
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
  # In the group without a right answer the likeliest one loses most.
  assert np.argmin(got[3:6]) == 0


def test_calibrated_confidence_of_answers_too_long_for_a_probability(make_reward_batch):
  batch = make_reward_batch([1.0, 0.0, 0.0], [0] * 3, [4000, 5000, 3000])
  got = _of('calibrated_confidence', batch)
  assert got[0][0] > 0 > max(got[1][0], got[2][0])


def test_flat_entropy(make_reward_batch, make_inputs, whole_loss):
  mixed = make_reward_batch([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
  _close(_of('flat_entropy', mixed), _of('group_std', mixed))
  np.testing.assert_array_equal(flat_entropy(mixed)[2:], [0.0, 0.0])
  inputs = clean(make_inputs(seed=3))
  group = np.asarray(inputs.group_t)
  # Groups 0 and 1 are flat, all right and all wrong; in group 2 one sample has advantage 0.
  adv = np.where(group < 2, 0.0, np.asarray(inputs.trajectory_t) - 4.0)
  reward = np.where(group == 0, 1.0, 0.0)
  inputs = inputs._replace(
    adv_t=jnp.asarray(np.where(inputs.mask_t, adv, 0.0), jnp.float32),
    reward_t=jnp.asarray(reward, jnp.float32),
  )
  entropy, mask = np.asarray(inputs.entropy_t, np.float64), np.asarray(inputs.mask_t)
  want = np.where(mask, adv, 0.0)
  for place in zip(*np.nonzero(mask), strict=True):
    own = mask & (np.asarray(inputs.trajectory_t) == np.asarray(inputs.trajectory_t)[place])
    if group[place] == 0:
      want[place] = 0.2 * entropy[place]
    if group[place] == 1:
      want[place] = -0.2 * (entropy[own].max() - entropy[place])
  assert {0, 1, 2} <= set(group[mask].tolist())
  got = jax.jit(lambda x: entropy_of_flat_groups(x, alpha=0.2))(inputs)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  objective = resolve(advantage='flat_entropy(alpha=0.2)', trust_region='reinforce', corrections=())
  assert objective.needs_scores
  prepared = loss.prepare(objective, inputs, {})
  np.testing.assert_allclose(prepared.tokens['adv_t'], want, rtol=1e-5, atol=1e-6)
  expected = -(want * np.asarray(inputs.log_probs_t))[mask].sum() / mask.sum()
  assert float(whole_loss(objective, inputs).loss) == pytest.approx(expected, rel=1e-4)
