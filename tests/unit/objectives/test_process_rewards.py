"""Rewards of steps and turns, from a trajectory to advantages, and the greedy baseline: plain loops.

A name in a test that is also a recipe's holds the boxes of that recipe.
"""

import dataclasses
import math

import numpy as np
import pytest

from rlax_stack.errors import DataError, RewardError
from rlax_stack.objectives.advantages.greedy import greedy_baseline
from rlax_stack.objectives.advantages.process import step_leave_one_out, step_std
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.process_rewards import (
  NO_STEPS,
  Steps,
  are_equal,
  spread,
  steps_of,
  turn_of_tokens,
  with_rest,
)
from rlax_stack.objectives.reward_batch import from_groups
from rlax_stack.objectives.shaping.process import process_clip, process_delta, process_min
from rlax_stack.types import FinishReason, Group, Prompt, Reward, Source, Trajectory


def _of(text, batch):
  return [values.tolist() for values in advantages_of(resolve(advantage=text), batch).adv_t]


def _close(got, want):
  for some, other in zip(got, want, strict=True):
    np.testing.assert_allclose(some, other, rtol=1e-5, atol=1e-6)


def _episode(source, reward, masked=(), **fields):
  source = np.array(source, np.int8)
  zeros = np.zeros(len(source), np.float32)
  return Trajectory(
    group_id=0,
    sample_index=0,
    prompt_id='p',
    tokens=np.arange(len(source), dtype=np.int32),
    source_t=source,
    mask_t=(source == Source.POLICY) & ~np.isin(np.arange(len(source)), masked),
    behaviour_log_probs_t=zeros,
    raw_log_probs_t=zeros,
    version_t=np.zeros(len(source), np.int32),
    finish_reason=FinishReason.STOP,
    reward=reward,
    **fields,
  )


# A prompt token, three turns of 2, 1 and 3 tokens, and two answers of the environment.
_TURNS = [0, 1, 1, 2, 1, 2, 1, 1, 1]


def test_steps_of_turns_and_of_tokens():
  turns = _episode(_TURNS, Reward(value=1.0, step_values=(0.5, 0.0, -1.0)))
  assert turn_of_tokens(turns).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
  place, reward = steps_of(turns)
  assert place.tolist() == [1, 2, 5] and reward.tolist() == [0.5, 0.0, -1.0]
  # Ends in tokens: after token 2, in the environment's answer, and before the end, which the last
  # step reaches.
  ends = _episode(_TURNS, Reward(value=1.0, step_values=(1.0, 2.0, 3.0)), step_ends=(2, 6, 8))
  assert steps_of(ends).place.tolist() == [0, 2, 5]
  early = _episode(_TURNS, Reward(value=1.0, step_values=(1.0, 2.0)), step_ends=(1, 2))
  assert steps_of(early).place.tolist() == [0, 5]
  # A turn that is not trained on gives its reward to the token before.
  masked = _episode(_TURNS, Reward(value=1.0, step_values=(0.5, 0.25, -1.0)), masked=(4,))
  assert steps_of(masked).place.tolist() == [1, 1, 4]
  assert spread(steps_of(masked), 5).tolist() == [0.0, 0.75, 0.0, 0.0, -1.0]
  for plain in (Reward(value=1.0), None):
    assert steps_of(_episode(_TURNS, plain)) is NO_STEPS
  assert steps_of(_episode([0, 0], Reward(value=1.0, step_values=(1.0,)))) is NO_STEPS


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'reward': Reward(value=1.0, step_values=(1.0, 2.0))}, '2 rewards of steps for 3 steps'),
    (
      {'reward': Reward(value=1.0, step_values=(1.0, 2.0)), 'step_ends': (8, 2)},
      'step_ends in order',
    ),
    ({'reward': Reward(value=1.0), 'roles': ('a', 'b')}, 'has 3 turns, but 2 roles'),
  ],
)
def test_steps_and_roles_that_do_not_fit_are_refused(fields, message):
  with pytest.raises(DataError, match=message):
    steps_of(_episode(_TURNS, **fields))


def test_a_step_that_is_not_finite_is_refused():
  with pytest.raises(RewardError, match='rewards of steps must be finite'):
    steps_of(_episode(_TURNS, Reward(value=1.0, step_values=(1.0, math.inf, 0.0))))


def test_the_batch_holds_steps_and_token_rewards_that_sum_to_the_reward():
  whole = _episode(_TURNS, Reward(value=2.0, step_values=(0.5, 0.25, -1.0)))
  plain = _episode(_TURNS, Reward(value=0.75))
  prompt = Prompt(prompt_id='p', messages=(), answer='')
  group = Group(group_id=0, prompt=prompt, prompt_tokens=np.arange(1), trajectories=(whole, plain))
  batch = from_groups([group])
  assert batch.token_reward_t[0].tolist() == [0.0, 0.5, 0.25, 0.0, 0.0, 1.25]
  assert batch.token_reward_t[1].tolist() == [0.0] * 5 + [0.75]
  assert batch.whole_steps[0].reward.tolist() == [0.5, 0.25, 1.25]
  assert batch.greedy_reward is None
  greedy = dataclasses.replace(plain, reward=Reward(value=0.25), sample_index=2)
  both = from_groups([dataclasses.replace(group, greedy=greedy)] * 2)
  assert both.greedy_reward.tolist() == [0.25] * 4
  assert from_groups([dataclasses.replace(group, greedy=greedy), group]).greedy_reward is None
  assert with_rest(NO_STEPS, 1.0, 0).reward.size == 0
  assert with_rest(Steps(np.array([1]), np.array([5.0])), 1.0, 2).reward.tolist() == [1.0]


def test_equal_but_for_rounding():
  assert are_equal(np.array([0.1 + 0.2, 0.3])) and are_equal(np.zeros(3))
  assert not are_equal(np.array([0.3, 0.3 + 1e-9]))


def test_remax(make_reward_batch):
  batch = make_reward_batch([1.0, 0.0, 0.5], [0, 0, 1], greedy=[0.75, 1.0])
  assert greedy_baseline(batch).tolist() == [0.25, -0.75, -0.5]
  _close(_of('greedy_baseline', batch), [[0.25] * 3, [-0.75] * 3, [-0.5] * 3])
  without = make_reward_batch([1.0, 0.0], [0, 0])
  with pytest.raises(DataError, match='a group of the batch has none'):
    greedy_baseline(without)


def test_process_clip_and_delta_by_hand(make_reward_batch):
  steps = [[(0, 0.9), (1, 0.2), (3, 0.5)], [(0, 0.1), (1, 0.4)], [(2, 0.3)], ()]
  batch = make_reward_batch([2.6, 0.5, 0.3, 1.0], [0, 0, 1, 1], [4, 2, 3, 2], steps=steps)
  clipped = process_clip(batch, absolute_high=0.4)
  _close([s.reward for s in clipped.steps], [[0.0, -0.2, 0.0], [-0.3, 0.0], [-0.1], []])
  _close(clipped.reward, [2.6 - 1.6 - 0.2, 0.5 - 0.5 - 0.3, 0.3 - 0.3 - 0.1, 1.0])
  delta = process_delta(batch)
  _close([s.reward for s in delta.steps], [[0.7, 0.2, 0.0], [0.1, 0.0], [0.0], []])
  # The sum is that of the first step, and what the steps left of the reward stays due at the end.
  _close(delta.reward, [1.0 + 0.9, 0.1, 0.0, 1.0])
  both = process_delta(process_clip(batch, absolute_high=0.4))
  _close([s.reward for s in both.steps], [[0.2, -0.2, 0.0], [-0.3, 0.0], [0.0], []])
  assert [s.place.tolist() for s in both.steps] == [[0, 1, 3], [0, 1], [2], []]


def test_repeating_a_good_step_pays_without_refinement_only(make_reward_batch):
  def reward(steps, *shaping):
    batch = make_reward_batch([sum(steps)], [0], [len(steps)], steps=[list(enumerate(steps))])
    for shape in resolve(shaping=shaping).shaping:
      batch = shape(batch)
    return batch.reward[0]

  once, often = [0.75, 0.25], [0.75, *[0.75] * 9, 0.25]
  assert reward(often) > reward(once)
  for box in ('process_clip', 'process_delta'):
    assert reward(often, box) == pytest.approx(reward(once, box))
  assert reward(often, 'process_min') == pytest.approx(reward(once, 'process_min'), abs=0.05)


def test_process_supervision(make_reward_batch):
  steps = [[(0, 1.0), (2, 0.0)], [(1, 0.5)], (), [(0, 0.0), (1, 0.25), (3, 1.0)]]
  # The last of each trajectory's steps has what they leave of its reward too: 0.5 of the first.
  batch = make_reward_batch([1.5, 0.5, 1.0, 1.25], [0, 0, 1, 1], [3, 2, 2, 4], steps=steps)
  groups = [[[(0, 1.0), (2, 0.5)], [(1, 0.5)]], [[(1, 1.0)], [(0, 0.0), (1, 0.25), (3, 1.0)]]]
  want = []
  for group, lengths in zip(groups, ([3, 2], [2, 4]), strict=True):
    rewards = [r for sample in group for _, r in sample]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) + 1e-6
    for sample, length in zip(group, lengths, strict=True):
      row = [sum((r - mean) / deviation for end, r in sample if end >= t) for t in range(length)]
      want.append(row)
  _close(step_std(batch), want)
  _close(_of('step_std', batch), want)
  # Without process rewards it is GRPO.
  plain = make_reward_batch([1.0, 0.0, 0.5, 1.0, 0.0], [0, 0, 0, 1, 1], [3, 2, 1, 4, 2])
  _close(_of('step_std', plain), _of('group_std', plain))
  loose = _of('step_std(ddof=0, eps=1.0)', plain)
  _close(loose, _of('group_std(ddof=0, eps=1.0)', plain))


def test_pure(make_reward_batch):
  steps = [[(0, 0.5), (2, -0.25)], [(1, 0.0), (3, 0.5)], [(1, 1.0)]]
  success = [1.0, 0.0, 1.0]
  rewards = [s + sum(r for _, r in of) for s, of in zip(success, steps, strict=True)]
  batch = make_reward_batch(rewards, [0] * 3, [3, 4, 2], steps=steps)
  shaped = process_min(batch, temperature=0.5)
  want_steps = []
  for of in steps:
    total = sum(math.exp(-r / 0.5) for _, r in of)
    want_steps.append([r * math.exp(-r / 0.5) / total for _, r in of])
  _close([s.reward for s in shaped.steps], want_steps)
  want = [s + sum(of) for s, of in zip(success, want_steps, strict=True)]
  _close(shaped.reward, want)
  # A cold softmax takes the least reward, and rewards to go are then the least of those to come.
  cold = process_min(batch, temperature=1e-3)
  np.testing.assert_allclose(cold.reward, [1.0 - 0.25, 0.0, 1.0 + 1.0], atol=1e-9)
  empty = make_reward_batch([1.0, 0.0], [0, 0])
  assert process_min(empty).reward.tolist() == [1.0, 0.0]
  # Success comes with the last step.
  dense = [[0.0] * n for n in (3, 4, 2)]
  for row, of, values, s in zip(dense, steps, want_steps, success, strict=True):
    for (place, _), value in zip(of, values, strict=True):
      row[place] += value
    row[-1] += s
  to_go = [[sum(row[t:]) for t in range(len(row))] for row in dense]
  want_adv = []
  for i, row in enumerate(to_go):
    others = sum(sum(other) for j, other in enumerate(to_go) if j != i)
    want_adv.append([g - others / (2 * 10) for g in row])
  _close(step_leave_one_out(shaped, max_tokens=10), want_adv)
  objective = resolve(
    shaping=('process_min(temperature=0.5)',), advantage='step_leave_one_out', max_tokens=10
  )
  _close(advantages_of(objective, batch).adv_t, want_adv)


def test_rewards_to_go_of_reinforce_pp_start_where_steps_end(make_reward_batch):
  steps = [[(0, 1.0), (2, 0.0)], [(1, 0.5)]]
  batch = make_reward_batch([1.0, 0.5], [0, 0], [3, 2], steps=steps)
  rows = [[1.0, 0.0, 0.0], [0.45, 0.5]]
  tokens = np.concatenate(rows)
  want = [(np.array(row) - tokens.mean()) / tokens.std() for row in rows]
  _close(_of('reinforce_pp(gamma=0.9, kl_coef=0)', batch), want)
