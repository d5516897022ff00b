"""Estimators and shaping of groups against a second way: loops and sets written out, float64.

A name in a test that is also a recipe's holds the boxes of that recipe.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.objectives.advantages.minimum_variance import minimum_variance
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.reward_batch import by_member, compared_groups, groups_of

_REWARDS = [1.0, 0.0, 1.0, 0.5, 0.0, 0.0, 1.0, 1.0, 1.0, 0.25, 0.0, 0.75, 0.0, 1.0]
_GROUP = [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3]
_LENGTH = [3, 4, 3, 2, 5, 1, 7, 2, 6, 4, 4, 8, 3, 5]
_MEMBERS = [[i for i, g in enumerate(_GROUP) if g == group] for group in range(4)]


@pytest.fixture(scope='module')
def batch(make_reward_batch):
  return make_reward_batch(_REWARDS, _GROUP, _LENGTH)


def _of(text, batch):
  """The advantage of each trajectory from the box that `text` names."""
  return np.array([values[0] for values in advantages_of(resolve(advantage=text), batch).adv_t])


def _shaped(text, batch):
  return resolve(shaping=(text,), max_tokens=8).shaping[0](batch)


def _expected(name):
  """Advantages of the batch above, written out per sample."""
  out = np.zeros(len(_REWARDS))
  varied = [m for m in _MEMBERS if len({_REWARDS[i] for i in m}) > 1]
  useful = sum(len(m) for m in varied)
  for member in varied:
    rewards = [_REWARDS[i] for i in member]
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    share = sum(r >= 0.5 for r in rewards) / len(rewards)
    for i in member:
      centred = _REWARDS[i] - mean
      if name == 'max_rl':
        out[i] = centred / mean
      if name == 'length_weighted':
        total = sum(_LENGTH[j] for j in member)
        out[i] = _REWARDS[i] - sum(_LENGTH[j] / total * _REWARDS[j] for j in member)
      if name == 'useful_share':
        out[i] = centred * len(_REWARDS) / useful
      if name == 'difficulty_weighted':
        rarity = share if centred > 0 else 1 - share
        out[i] = centred / (spread + 1e-6) * (0.4 + 1.1 / (1 + math.exp(10 * (rarity - 0.75))))
  if name == 'signed':
    out = np.array([0.1 if r >= 0.5 else -1.0 for r in _REWARDS])
  return out


@pytest.mark.parametrize(
  'name', ['max_rl', 'length_weighted', 'useful_share', 'difficulty_weighted', 'signed']
)
def test_advantages_written_out(name, batch):
  np.testing.assert_allclose(_of(name, batch), _expected(name), rtol=1e-6, atol=1e-7)


def test_reference_values_of_two_groups_of_two(make_reward_batch):
  pairs = make_reward_batch([1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1], [3, 4, 3, 2])
  np.testing.assert_allclose(_of('max_rl', pairs), [1, -1, 1 / 3, -1 / 3], rtol=1e-6)
  want = [0.57142857, -0.42857143, 0.2, -0.3]
  np.testing.assert_allclose(_of('length_weighted', pairs), want, rtol=1e-6)


def test_max_rl_does_not_divide_by_a_mean_of_zero_or_less(make_reward_batch):
  below = make_reward_batch([1.0, -1.0, -2.0, 0.0], [0, 0, 1, 1])
  np.testing.assert_array_equal(_of('max_rl', below), [0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize('k', [2, 3, 4, 7])
def test_max_at_k_sums_over_all_sets(k, batch):
  out = np.zeros(len(_REWARDS))
  for member in _MEMBERS:
    size, chosen = len(member), min(k, len(member))
    for i in member:
      for chosen_set in itertools.combinations(member, chosen):
        if i in chosen_set:
          without = max(_REWARDS[j] for j in chosen_set if j != i)
          best = max(_REWARDS[j] for j in chosen_set)
          out[i] += (best - without) * size / math.comb(size, chosen)
  np.testing.assert_allclose(_of(f'max_at_k(k={k})', batch), out, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('k', [1, 2, 3, 7])
def test_pass_at_k_is_grpo_over_all_sets(k, batch):
  out = np.zeros(len(_REWARDS))
  for member in _MEMBERS:
    sets = list(itertools.combinations(member, min(k, len(member))))
    passed = np.array([any(_REWARDS[j] >= 0.5 for j in s) for s in sets], float)
    if passed.std() > 0:
      adv = (passed - passed.mean()) / passed.std()
      for i in member:
        out[i] = np.mean([a for a, s in zip(adv, sets, strict=True) if i in s])
  np.testing.assert_allclose(_of(f'pass_at_k(k={k})', batch), out, rtol=1e-6, atol=1e-7)


def test_pass_at_1_is_grpo_of_binary_rewards(make_reward_batch):
  binary = make_reward_batch([1.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 1, 1])
  grpo = _of('group_std(ddof=0, eps=0)', binary)
  np.testing.assert_allclose(_of('pass_at_k(k=1)', binary), grpo, rtol=1e-6)


@pytest.mark.parametrize('k', [1, 2, 3, 7])
def test_max_at_k_reward_is_the_mean_over_sets(k, batch):
  want = np.zeros(len(_REWARDS))
  for member in _MEMBERS:
    sets = list(itertools.combinations(member, min(k, len(member))))
    for i in member:
      want[i] = np.mean([max(_REWARDS[j] for j in s) for s in sets if i in s])
  np.testing.assert_allclose(_shaped(f'max_at_k_reward(k={k})', batch).reward, want, rtol=1e-12)


def test_max_at_k_is_unbiased():
  """Over all groups of four draws from a policy: the estimate's mean is the exact gradient."""
  values, logits = np.array([0.0, 0.3, 1.0]), np.array([0.2, -0.5, 0.1])
  policy = np.exp(logits) / np.exp(logits).sum()
  box = resolve(advantage='max_at_k(k=2)').advantage

  def best_of_two(policy):
    return sum(
      policy[i] * policy[j] * max(values[i], values[j]) for i in range(3) for j in range(3)
    )

  estimate = np.zeros(3)
  for draw in itertools.product(range(3), repeat=4):
    chance = np.prod(policy[list(draw)])
    adv = box(_Rewards(values[list(draw)], np.zeros(4, int)))
    score = np.eye(3)[list(draw)] - policy
    estimate += chance * (adv[:, None] * score).mean(0)
  exact = np.zeros(3)
  for i in range(3):
    step = 1e-6 * np.eye(3)[i]
    high, low = (np.exp(logits + s) / np.exp(logits + s).sum() for s in (step, -step))
    exact[i] = (best_of_two(high) - best_of_two(low)) / 2e-6
  np.testing.assert_allclose(estimate, exact, atol=1e-8)


@dataclasses.dataclass
class _Rewards:
  """What an estimator of rewards alone reads of a RewardBatch."""

  reward: np.ndarray
  group: np.ndarray


def test_lengths_shape_rewards_within_a_group(make_reward_batch):
  batch = make_reward_batch([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1], [2, 6, 10, 4, 5, 5])
  # Shares of the way from 2 to 10: 0, 1/2, 1, 1/4. The second group is of equal lengths.
  want = [1.5, 1.0, -0.5, 0.0, 1.0, 0.0]
  np.testing.assert_allclose(_shaped('short_first', batch).reward, want)
  want = [1.25, 1.0, -0.25, 0.0, 1.0, 0.0]
  np.testing.assert_allclose(_shaped('short_first(weight=0.5)', batch).reward, want)


def test_short_correct_and_length_decay_by_hand(make_reward_batch):
  batch = make_reward_batch([1.0, 1.0, 0.0, 1.0, 0.0], [0, 0, 0, 1, 1], [2, 6, 10, 5, 4])
  sigmoid = [1 / (1 + math.exp(1)), 1 / (1 + math.exp(-1))]  # z = −1, 1: mean 4, deviation 2
  want = [1 - 0.4 * sigmoid[0], 1 - 0.4 * sigmoid[1], 0.0, 0.8, 0.0]
  got = _shaped('short_correct(alpha=0.4, eps=0)', batch).reward
  np.testing.assert_allclose(got, want, rtol=1e-12)
  z = 2 / math.sqrt(8)
  want = [math.exp(0.1 * z), math.exp(-0.1 * z), -1.0, 1.0, -1.0]
  got = _shaped('length_decay(alpha=0.1, eps=0)', batch).reward
  np.testing.assert_allclose(got, want, rtol=1e-12)


def test_adaptive_length_by_hand(make_reward_batch):
  rewards, length = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0], [2, 8, 4, 6, 4, 8, 1]
  batch = make_reward_batch(rewards, [0, 0, 0, 0, 1, 1, 1], length)
  # Three of four solved, none of three: 3/4 and 1/3 of the price of 0.2 for 8 tokens.
  price = [0.2 * 0.75 / 8] * 4 + [0.2 / 3 / 8] * 3
  want = [r - p * n for r, p, n in zip(rewards, price, length, strict=True)]
  np.testing.assert_allclose(_shaped('adaptive_length(coef=0.2)', batch).reward, want, rtol=1e-12)
  # With a bound for correct that no reward reaches, all prompts are as hard as can be.
  got = _shaped('adaptive_length(coef=0.2, correct_at=2.0, max_tokens=16)', batch).reward
  want = [r - 0.2 / g * n / 16 for r, g, n in zip(rewards, [4] * 4 + [3] * 3, length, strict=True)]
  np.testing.assert_allclose(got, want, rtol=1e-12)


def test_truncated_reward_replaces_whatever_was_there(make_reward_batch):
  batch = make_reward_batch([1.0, 0.0, 0.5], [0] * 3, truncated=[True, False, True])
  np.testing.assert_array_equal(_shaped('truncated_reward', batch).reward, [-0.2, 0.0, -0.2])


def test_members_of_groups(batch, make_reward_batch):
  assert [member.tolist() for member in groups_of(batch)] == _MEMBERS
  assert [member.tolist() for member in compared_groups(batch)] == _MEMBERS
  np.testing.assert_array_equal(by_member(batch, lambda m: m)[:4], [0, 1, 2, 3])
  with pytest.raises(ConfigError, match='at least 2 samples per group, got 1'):
    compared_groups(make_reward_batch([1.0], [0]))


@pytest.mark.parametrize('by_std', [True, False])
def test_minimum_variance_of_equal_gradients_is_the_centred_reward(by_std, make_reward_batch):
  batch = make_reward_batch([1.0, 0.0, 0.0, 0.5, 0.5], [0, 0, 0, 1, 1])
  found = minimum_variance(batch, by_std=by_std)
  scale = np.sqrt(2 / 9) if by_std else 1.0
  np.testing.assert_allclose(found, np.array([2, -1, -1, 0, 0]) / 3 / scale, rtol=1e-9)
