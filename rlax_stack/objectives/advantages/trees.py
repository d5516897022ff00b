"""Advantages that know how the samples of a group were drawn: their tree, or the tokens they were given.

Not for trees found in the tokens themselves (`branches.py`). Invariant: a group of independent samples gets the
advantages of a plain group estimator.
"""

from collections.abc import Hashable
from typing import Annotated

import numpy as np

from rlax_stack.errors import ConfigError
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch, TokenValues, by_member, compared_groups
from rlax_stack.types import Source, Trajectory


def tree_std(
  batch: RewardBatch,
  *,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> np.ndarray:
  """Reward standardised over the group, plus reward standardised over the sample's own tree (Tree-GRPO).

  Aᵢ = (Rᵢ − μ_g) / (s_g + ε) + (Rᵢ − μ_τ) / (s_τ + ε),  τ the tree of sample i

  A tree of one sample, or of equal rewards, adds nothing. Divided by: the standard deviations of group and tree.
  Gradient flows through: nothing (numpy).
  See "Tree Search for LLM Agent Reinforcement Learning", Ji et al. (https://arxiv.org/abs/2509.21240).

  Args:
    batch: ragged groups of at least 2, with trajectories.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviations.

  Returns: float64 [B].
  """

  def estimate(member: np.ndarray) -> np.ndarray:
    rewards = batch.reward[member]
    trees = _parts([_tree(batch.trajectories[i]) for i in member])
    return _standard(rewards, ddof, eps) + _within(rewards, trees, ddof, eps)

  return by_member(batch, estimate)


def start_std(
  batch: RewardBatch,
  *,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> np.ndarray:
  """Reward standardised over the samples of the group that began with the same given tokens (PrefixRL).

  Aᵢ = (Rᵢ − μ_s) / (s_s + ε),  s the samples of the group with the guide of sample i

  So a guide that makes the task easier does not count against samples without it. A sample that is alone with its
  guide gets 0. Divided by: the standard deviation of those samples. Gradient flows through: nothing (numpy).
  See "Reuse your FLOPs: Scaling RL on Hard Problems by Conditioning on Very Off-Policy Prefixes", Setlur et al.
  (https://arxiv.org/abs/2601.18795).

  Args:
    batch: ragged groups of at least 2, with trajectories.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64 [B].
  """

  def estimate(member: np.ndarray) -> np.ndarray:
    starts = _parts([_start(batch.trajectories[i]) for i in member])
    return _within(batch.reward[member], starts, ddof, eps)

  return by_member(batch, estimate)


def vine(batch: RewardBatch) -> TokenValues:
  """What the states between steps are worth, told by Monte-Carlo rollouts from them (VinePPO).

  Aₜ = V(sₖ₊₁) − V(sₖ) for the tokens of step k,  V(s) = mean reward of the rollouts from s

  The rollouts are the samples that train nothing; each began at a state of a sample that does. At the prompt V is the
  mean reward of the group's other samples that train, at the end V is the reward. Divided by: nothing. Gradient
  flows through: nothing (numpy).
  See "VinePPO", Kazemnejad et al. (https://arxiv.org/abs/2410.01679).

  Args:
    batch: ragged groups with trajectories, at least 2 of each that train.

  Returns: float64, one array per trajectory.

  Raises:
    ConfigError: a group with fewer than 2 samples that train.
  """
  out = [np.zeros(n) for n in batch.length]
  for member in compared_groups(batch):
    trained = [i for i in member if batch.length[i]]
    if len(trained) < 2:
      raise ConfigError(
        f'vine needs 2 or more samples per group that are trained on, got {len(trained)}. Raise roots of '
        "config.rollout.strategy=tree(trains='roots')."
      )
    if (batch.reward[member] == batch.reward[member[0]]).all():
      continue
    total = batch.reward[trained].sum()
    for i in trained:
      at_prompt = (total - batch.reward[i]) / (len(trained) - 1)
      out[i] = _vine_steps(batch, member, i, at_prompt)
  return tuple(out)


def _vine_steps(batch: RewardBatch, member: np.ndarray, i: int, at_prompt: float) -> np.ndarray:
  """Advantage of every trained token of one trajectory."""
  trajectory = batch.trajectories[i]
  rollouts: dict[int, list[float]] = {}
  for j in member:
    branch = batch.trajectories[j].branch
    if branch is not None and not batch.length[j] and branch.parent == trajectory.sample_index:
      rollouts.setdefault(branch.length, []).append(float(batch.reward[j]))
  ends = [*sorted(rollouts), len(trajectory.tokens)]
  values = [at_prompt, *(float(np.mean(rollouts[end])) for end in ends[:-1]), batch.reward[i]]
  step = np.searchsorted(ends, np.flatnonzero(trajectory.mask_t), side='right')
  return np.diff(values)[step]


def _tree(trajectory: Trajectory) -> Hashable:
  return trajectory.sample_index if trajectory.branch is None else trajectory.branch.root


def _start(trajectory: Trajectory) -> Hashable:
  """The tokens given before the first one that was sampled."""
  source = np.asarray(trajectory.source_t)
  first = int((source == Source.POLICY).argmax())
  return np.asarray(trajectory.tokens)[:first][source[:first] == Source.GUIDE].tobytes()


def _parts(keys: list[Hashable]) -> list[np.ndarray]:
  """Places of equal keys."""
  places: dict[Hashable, list[int]] = {}
  for place, key in enumerate(keys):
    places.setdefault(key, []).append(place)
  return [np.array(part) for part in places.values()]


def _within(rewards: np.ndarray, parts: list[np.ndarray], ddof: int, eps: float) -> np.ndarray:
  out = np.zeros(len(rewards))
  for part in parts:
    out[part] = _standard(rewards[part], ddof, eps)
  return out


def _standard(rewards: np.ndarray, ddof: int, eps: float) -> np.ndarray:
  if (rewards == rewards[0]).all():
    return np.zeros(len(rewards))
  return (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + eps)


_GROUP = frozenset({'group'})

TABLE = {
  'tree_std': Box(
    tree_std, formula='A = (R − μ_g)/(s_g + {eps:g}) + (R − μ_τ)/(s_τ + {eps:g})', tags=_GROUP
  ),
  'start_std': Box(
    start_std, formula='A = (R − μ_s)/(s_s + {eps:g}), s: equal guides', tags=_GROUP
  ),
  'vine': Box(vine, formula="A = V(s') − V(s), V of rollouts", tags=_GROUP),
}
