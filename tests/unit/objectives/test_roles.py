"""Advantages by agent and turn, and the state that a box on the host carries, against plain loops.

A name in a test that is also a recipe's holds the boxes of that recipe.
"""

import copy
import json
import math

import numpy as np
import pytest

from rlax_stack.objectives.advantages.roles import agent_turn_std, role_baseline
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.objective import resolve


def _of(text, batch):
  return [values.tolist() for values in advantages_of(resolve(advantage=text), batch).adv_t]


def _close(got, want):
  for some, other in zip(got, want, strict=True):
    np.testing.assert_allclose(some, other, rtol=1e-5, atol=1e-6)


def _team(make_reward_batch):
  """Three samples of one prompt: a coder and a tester who take turns, as far as each sample goes."""
  turns = [[0, 0, 1, 2, 3], [0, 1, 1, 2], [0, 1]]
  roles = [
    ['coder', 'tester', 'coder', 'tester'],
    ['coder', 'tester', 'tester'],
    ['tester', 'coder'],
  ]
  steps = [[(1, 0.5), (2, 0.0), (3, 1.0), (4, 0.25)], [(0, 0.0), (2, 0.5), (3, 0.0)], ()]
  return make_reward_batch(
    [2.75, 0.5, 1.0], [0] * 3, [5, 4, 2], turns=turns, roles=roles, steps=steps
  )


def test_at_grpo(make_reward_batch):
  batch = _team(make_reward_batch)
  assert batch.steps[0].reward.sum() == 1.75  # the team got 1 in the first and the third, else 0
  for alpha in (1.0, 0.5):
    reward = {
      ('coder', 0): {(0, 0): alpha + 0.5, (1, 0): 0.0, (2, 1): alpha},
      ('tester', 0): {(0, 1): alpha, (1, 1): 0.5, (2, 0): alpha},
      ('coder', 1): {(0, 2): alpha + 1.0},
      ('tester', 1): {(0, 3): alpha + 0.25, (1, 2): 0.0},
    }
    want = [np.zeros(5), np.zeros(4), np.zeros(2)]
    for of_turn in reward.values():
      values = list(of_turn.values())
      if len(values) < 2:
        continue
      mean = sum(values) / len(values)
      deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) + 1e-6
      for (sample, turn), value in of_turn.items():
        want[sample][batch.turn_t[sample] == turn] = (value - mean) / deviation
    _close(agent_turn_std(batch, alpha=alpha), want)
    _close(_of(f'agent_turn_std(alpha={alpha})', batch), want)


def test_one_agent_has_a_group_for_every_turn(make_reward_batch):
  turns = [[0, 0, 1, 2], [0, 1, 1], [0, 0]]
  batch = make_reward_batch([1.0, 0.0, 0.5], [0] * 3, [4, 3, 2], turns=turns)
  # 1, 0 and 1/2 in the first turn, 1 and 0 in the second, 1 in the third
  first, second = 0.5 / (0.5 + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)
  want = [[first, first, second, 0.0], [-first, -second, -second], [0.0, 0.0]]
  _close(_of('agent_turn_std', batch), want)
  one_turn = make_reward_batch([1.0, 0.0, 0.5, 1.0, 0.0], [0, 0, 0, 1, 1])
  _close(_of('agent_turn_std', one_turn), _of('group_std', one_turn))


def test_equal_turns_say_nothing_even_without_eps(make_reward_batch):
  steps = [[(0, 0.1), (1, 0.2)], [(0, 0.2), (1, 0.1)]]
  batch = make_reward_batch([0.1 + 0.2 + 1.0, 1.3], [0, 0], [2, 2], steps=steps)
  assert not np.any(_of('agent_turn_std(eps=0)', batch))


def _games(make_reward_batch):
  """Two games of two players in one trajectory each, and one answer of a single role."""
  return make_reward_batch(
    [0.0, 0.5, 1.0],
    [0, 1, 2],
    [4, 3, 2],
    turns=[[0, 0, 1, 2], [0, 1, 1], [0, 0]],
    roles=[['x', 'o', 'x'], ['x', 'o'], []],
    steps=[[(1, 0.0), (2, -1.0), (3, 1.0)], [(0, -1.0), (2, 1.0)], ()],
    metadata=[{'task': 'chess'}, {'task': 'chess'}, {'task': 'go', 'role': 'o'}],
  )


def test_spiral(make_reward_batch):
  batch = _games(make_reward_batch)
  adv, state = role_baseline(batch, state={}, decay=0.75)
  # The second game starts from the baselines of the first, and leaves 1/2 to both of its players.
  x, o = 0.25, -0.25
  want = [[1.0, 1.0, -1.0, 1.0], [-0.5 - x, 1.5 - o, 1.5 - o], [1.0, 1.0]]
  _close(adv, want)
  assert state == {
    'chess': {'x': 0.75 * x + 0.25 * -0.5, 'o': 0.75 * o + 0.25 * 1.5},
    'go': {'o': 0.25},
  }
  _, again = role_baseline(batch, state=state, decay=0.75)
  third = role_baseline(batch, state=state, decay=0.75)[0]
  assert third[2].tolist() == [0.75, 0.75] and again['go']['o'] == 0.75 * 0.25 + 0.25
  _close(_of('role_baseline(game_key="none", role_key="none")', batch)[2:], [[1.0, 1.0]])
  one_game = role_baseline(batch, state={}, decay=0.75, game_key='none', role_key='role')
  want_o = (o * 0.75 + 0.25 * 1.5, 1.0)
  assert one_game[0][2][0] == pytest.approx(want_o[1] - want_o[0])


def test_state_of_a_host_box_is_carried_and_comes_back_from_json(make_reward_batch):
  objective = resolve(advantage='role_baseline(decay=0.9)')
  assert objective.init_host_state() == {'advantage': {}} and resolve().init_host_state() == {}
  assert list(objective.host_boxes) == ['advantage']
  batch = _games(make_reward_batch)
  first = advantages_of(objective, batch)
  kept = copy.deepcopy(first.state)
  second = advantages_of(objective, batch, first.state)
  assert first.state == kept  # a box is pure: what it was given stays
  again = advantages_of(objective, batch, json.loads(json.dumps(first.state)))
  assert again.state == second.state != first.state
  for some, other in zip(again.adv_t, second.adv_t, strict=True):
    np.testing.assert_array_equal(some, other)
  assert advantages_of(resolve(), make_reward_batch([1.0, 0.0], [0, 0])).state == {}


def test_a_role_without_a_trained_token_still_moves_its_baseline(make_reward_batch):
  batch = make_reward_batch([0.0], [0], [1], turns=[[1]], roles=[['x', 'o']], steps=[[(0, 1.0)]])
  adv, state = role_baseline(batch, state={}, decay=0.5)
  assert adv[0].tolist() == [0.0] and state == {'': {'x': -0.5, 'o': 0.0}}
