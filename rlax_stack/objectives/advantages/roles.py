"""Advantages by agent: who speaks in a turn, and what that turn brought.

Not for how agents take turns. Invariant: a trajectory without roles has one agent, and one without
process rewards gives its whole reward to each of its turns.
"""

from collections.abc import Hashable, Mapping
from typing import Annotated, Any

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.process_rewards import are_equal
from rlax_stack.objectives.reward_batch import RewardBatch, TokenValues, compared_groups


def agent_turn_std(
  batch: RewardBatch,
  *,
  alpha: Annotated[float, Range(0.0)] = 1.0,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> TokenValues:
  """The advantage of GRPO with a group for every agent and turn, each with rewards of its own (AT-GRPO).

  Aᵢₜ = (rᵢₖ − μ) / (s + ε),  rᵢₖ = α r_team + r_local,ₖ,  k the turn of token t

  μ and s over the samples of the group that have this turn of this agent, its first with the first and
  so on; 0 where no other sample has. r_local the rewards of the turn's steps, r_team what the steps
  leave of the trajectory's reward. Divided by: the standard deviation of that group. Gradient flows
  through: nothing (numpy).
  See "Stronger-MAS", Zhao et al. (https://arxiv.org/abs/2510.11062), section 4.1. Its samples branch
  anew at every turn from the best one before; how they are drawn is not the estimator's.

  Args:
    batch: ragged groups of at least 2, with trajectories.
    alpha: α, the weight of what the team got.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64, one array per trajectory.
  """
  out = [np.zeros(n) for n in batch.length]
  local = [_turn_rewards(batch, i) for i in range(batch.reward.size)]
  team = [batch.reward[i] - batch.steps[i].reward.sum() for i in range(batch.reward.size)]
  for member in compared_groups(batch):
    having: dict[Hashable, list[tuple[int, int]]] = {}
    for i in member:
      for turn, key in _agent_turns(batch, i).items():
        having.setdefault(key, []).append((i, turn))
    for turns in having.values():
      rewards = np.array([alpha * team[i] + local[i][turn] for i, turn in turns])
      if rewards.size < 2 or are_equal(rewards):
        continue
      adv = (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + eps)
      for (i, turn), value in zip(turns, adv, strict=True):
        out[i][batch.turn_t[i] == turn] = value
  return tuple(out)


def role_baseline(
  batch: RewardBatch,
  *,
  state: Mapping[str, Mapping[str, float]],
  decay: Annotated[float, Range(0.0, 1.0)] = 0.95,
  game_key: str = 'task',
  role_key: str = 'role',
) -> tuple[TokenValues, dict[str, Any]]:
  """Reward of a role minus the running mean of that role's rewards in that game (SPIRAL).

  Aᵢₜ = Rᵢₚ − b_{g,p},  then b_{g,p} ← α b_{g,p} + (1 − α) Rᵢₚ,  p the role that speaks at token t

  Trajectory by trajectory in the order of the batch, from b = 0. Rᵢₚ is the rewards of the steps in
  the role's turns, and what all steps leave of the trajectory's reward; without process rewards that
  is the whole of it for each role. No group is needed. Divided by: nothing. Gradient flows through:
  nothing (numpy).
  See "SPIRAL", Liu et al. (https://arxiv.org/abs/2506.24119), role-conditioned advantage estimation;
  its code (https://github.com/spiral-rl/spiral) subtracts the baseline from before the update.

  Args:
    batch: any, with trajectories and metadata.
    state: b by game and role.
    decay: α.
    game_key: of the prompts' metadata, the game; prompts without it are one game.
    role_key: of the prompts' metadata, the role where a trajectory names none itself.

  Returns: float64, one array per trajectory, and the next state.
  """
  baselines = {game: dict(roles) for game, roles in state.items()}
  out = [np.zeros(n) for n in batch.length]
  for i in range(batch.reward.size):
    of_game = baselines.setdefault(str(batch.metadata[i].get(game_key, '')), {})
    own, local = str(batch.metadata[i].get(role_key, '')), _turn_rewards(batch, i)
    team = batch.reward[i] - batch.steps[i].reward.sum()
    roles = batch.trajectories[i].roles or (own,) * (max(local, default=-1) + 1)
    for role in dict.fromkeys(roles):
      turns = [turn for turn, speaker in enumerate(roles) if speaker == role]
      reward = float(team + sum(local.get(turn, 0.0) for turn in turns))
      before = of_game.get(role, 0.0)
      out[i][np.isin(batch.turn_t[i], turns)] = reward - before
      of_game[role] = decay * before + (1.0 - decay) * reward
  return tuple(out), baselines


def _turn_rewards(batch: RewardBatch, index: int) -> dict[int, float]:
  """Turn of trained tokens to the sum of the rewards of the steps that end in it."""
  turn_t, (place, reward) = batch.turn_t[index], batch.steps[index]
  return {int(k): float(reward[turn_t[place] == k].sum()) for k in np.unique(turn_t)}


def _agent_turns(batch: RewardBatch, index: int) -> dict[int, Hashable]:
  """Turn to (agent, how many turns the agent had before)."""
  present, roles = np.unique(batch.turn_t[index]), batch.trajectories[index].roles
  keys, had = {}, dict.fromkeys(roles, 0)
  for turn in range(int(present.max(initial=-1)) + 1):
    role = roles[turn] if roles else ''
    keys[turn] = (role, had.get(role, 0))
    had[role] = had.get(role, 0) + 1
  return {turn: key for turn, key in keys.items() if turn in present}


TABLE = {
  'agent_turn_std': Box(
    agent_turn_std,
    formula='A = ({alpha:g}·R_team + r − μ)/(s + {eps:g}) of group, agent and turn',
    tags=frozenset({'group'}),
  ),
  'role_baseline': Box(
    role_baseline,
    formula='A = R − b, b = {decay:g}·b + (1 − {decay:g})·R of {game_key} and {role_key}',
    tags=frozenset({'batch'}),
    host_state=lambda: {},
  ),
}
