"""Off-policy max@k against sums over all sets of k answers, written out in float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives.advantages.off_policy_best_of_k import off_policy_max_at_k, reweighed
from rlax_stack.objectives.inputs import LossInputs, clean
from rlax_stack.objectives.objective import resolve

_LENGTH = 3


def _inputs(rewards, groups, gaps, rng):
  """One answer of up to three tokens to a row; `gaps` are π/π_behaviour − 1 of whole answers."""
  count = len(rewards)
  length = rng.integers(1, _LENGTH + 1, count)
  mask = np.arange(_LENGTH) < length[:, None]
  behaviour = -1.0 - rng.random((count, _LENGTH))
  current = behaviour + (np.log1p(gaps) / length)[:, None]
  shape = (2, count // 2, _LENGTH)

  def tokens(value, dtype=jnp.float32):
    value = np.broadcast_to(np.asarray(value), (count, _LENGTH))
    return jnp.asarray(
      np.where(mask, value, np.nan if dtype == jnp.float32 else -1).reshape(shape), dtype
    )

  zero, ids = tokens(0.0), tokens(np.arange(count)[:, None], jnp.int32)
  return clean(
    LossInputs(
      log_probs_t=tokens(current),
      entropy_t=zero,
      proximal_log_probs_t=zero,
      behaviour_log_probs_t=tokens(behaviour),
      anchor_log_probs_t=zero,
      adv_t=zero,
      reward_t=tokens(np.asarray(rewards)[:, None]),
      mask_t=jnp.asarray(mask.reshape(shape)),
      weight_t=zero,
      trajectory_t=ids,
      group_t=tokens(np.asarray(groups)[:, None], jnp.int32),
      turn_t=ids,
      version_t=ids,
      staleness_t=ids,
    )
  )


def _expected(rewards, groups, gaps, k):
  """The advantages, set by set."""
  out = np.zeros(len(rewards))
  for g in set(groups):
    member = [i for i in range(len(rewards)) if groups[i] == g]
    chosen = min(k, len(member))
    if len({rewards[i] for i in member}) == 1:
      continue
    value = []
    for i in member:
      sets = [s for s in itertools.combinations(member, chosen) if i in s]
      total = sum((1 + sum(gaps[j] for j in s)) * max(rewards[j] for j in s) for s in sets)
      value.append(total / math.comb(len(member) - 1, chosen - 1))
    value = np.array(value)
    if chosen == len(member):  # one set: all answers are alike
      continue
    out[member] = (value - value.mean()) / (value.std(ddof=1) + 1e-6)
  return out


@pytest.mark.parametrize('k', [2, 3, 5, 9])
@pytest.mark.parametrize('drift', [0.0, 0.15])
def test_rewards_are_sums_over_all_sets(k, drift):
  rng = np.random.default_rng(k)
  groups = [0] * 7 + [1] * 2 + [2] * 4 + [3] * 3
  rewards = rng.integers(0, 5, len(groups)) / 4.0  # with ties
  rewards[-3:] = 0.5
  gaps = drift * rng.uniform(-1, 1, len(groups))
  order = rng.permutation(len(groups))
  rewards, groups, gaps = rewards[order], [groups[i] for i in order], gaps[order]
  inputs = _inputs(rewards, groups, gaps, rng)
  got = np.asarray(jax.jit(lambda x: reweighed(x, k=k, delta=0.5))(inputs)).reshape(-1, _LENGTH)
  want = _expected(rewards, groups, gaps, k)
  mask = np.asarray(inputs.mask_t).reshape(-1, _LENGTH)
  np.testing.assert_allclose(got, np.where(mask, want[:, None], 0.0), atol=2e-4)
  assert (np.abs(want).max() > 0.5) == (k < 7)


def test_ratios_far_from_one_are_held_within_the_bound():
  rng = np.random.default_rng(0)
  rewards, groups = np.array([0.0, 1.0, 0.5, 0.25]), [0] * 4
  wild = np.array([4.0, -0.9, 0.05, 0.0])
  held = np.clip(wild, -0.1, 0.1)
  got = reweighed(_inputs(rewards, groups, wild, rng), k=2, delta=0.1)
  want = _expected(rewards, groups, held, 2)
  np.testing.assert_allclose(np.asarray(got).reshape(4, -1)[:, 0], want, atol=1e-5)
  assert not np.allclose(want, _expected(rewards, groups, np.zeros(4), 2), atol=1e-3)


def test_host_form_is_the_one_of_ratio_one(make_reward_batch):
  rewards, groups = np.array([1.0, 0.0, 0.5, 0.25, 1.0, 1.0]), [0, 0, 0, 0, 1, 1]
  found = off_policy_max_at_k(make_reward_batch(rewards, groups), k=3)
  np.testing.assert_allclose(found, _expected(rewards, groups, np.zeros(6), 3), atol=1e-9)
  objective = resolve(advantage='off_policy_max_at_k(k=3)', trust_region='reinforce')
  assert objective.needs_scores and objective.advantage.name == 'off_policy_max_at_k'
