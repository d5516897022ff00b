"""Advantages from rewards of single steps.

Not for refining those rewards (`shaping/process.py`). Invariant: without process rewards a trajectory is
one step, and the estimator is that of its whole reward.
"""

from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.process_rewards import Steps, are_equal, spread
from rlax_stack.objectives.reward_batch import RewardBatch, TokenValues, compared_groups


def step_std(
  batch: RewardBatch,
  *,
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0)] = 1e-6,
) -> TokenValues:
  """Rewards of steps, standardised over all steps of the group, summed from the token on (GRPO with
  process supervision).

  Aᵢₜ = Σ_{end(j) ≥ t} (rᵢⱼ − μ_g) / (s_g + ε),  μ_g and s_g over all steps of all samples of the group

  What a trajectory's steps leave of its reward counts with its last step. Divided by: the standard
  deviation of the group's steps. Gradient flows through: nothing (numpy).
  See "DeepSeekMath", Shao et al. (https://arxiv.org/abs/2402.03300), section 4.1.3.

  Args:
    batch: ragged groups of at least 2.
    ddof: 1 for the sample's standard deviation, 0 for the population's.
    eps: added to the standard deviation.

  Returns: float64, one array per trajectory; exactly 0 where all steps of the group have one reward.
  """
  out, whole = [np.zeros(n) for n in batch.length], batch.whole_steps
  for member in compared_groups(batch):
    rewards = np.concatenate([whole[i].reward for i in member])
    if rewards.size < 2 or are_equal(rewards):
      continue
    scale = rewards.std(ddof=ddof) + eps
    for i in member:
      standard = Steps(whole[i].place, (whole[i].reward - rewards.mean()) / scale)
      out[i] = np.cumsum(spread(standard, int(batch.length[i]))[::-1])[::-1]
  return tuple(out)


def step_leave_one_out(
  batch: RewardBatch, *, max_tokens: Annotated[int, Range(1)] = 0
) -> TokenValues:
  """Rewards of steps to go, minus the mean per place of the other samples' rewards to go (PURE).

  Aᵢₜ = Gᵢₜ − Σ_{j≠i} Σₛ Gⱼₛ / ((n − 1) L),  Gᵢₜ = Σ_{end(j) ≥ t} rᵢⱼ,  n the samples of the group

  Places beyond the end of an answer count as 0 in the baseline, so that it does not favour answers of
  few steps. Divided by: (n − 1) L in the baseline. Gradient flows through: nothing (numpy).
  See "Stop Summation: Min-Form Credit Assignment Is All Process Reward Model Needs for Reasoning",
  Cheng et al. (https://arxiv.org/abs/2504.15275), and its code (https://github.com/CJReinforce/PURE).

  Args:
    batch: ragged groups of at least 2.
    max_tokens: L; 0 takes config.rollout.max_tokens.

  Returns: float64, one array per trajectory; not 0 where all rewards of a group are equal.
  """
  out = [np.cumsum(rewards[::-1])[::-1] for rewards in batch.token_reward_t]
  for member in compared_groups(batch):
    totals = np.array([out[i].sum() for i in member])
    others = (totals.sum() - totals) / ((member.size - 1) * max_tokens)
    for i, baseline in zip(member, others, strict=True):
      out[i] = out[i] - baseline
  return tuple(out)


TABLE = {
  'step_std': Box(
    step_std,
    formula='A = Σ (r − μ_g)/(s_g + {eps:g}) over the steps to go',
    tags=frozenset({'group', 'steps'}),
  ),
  'step_leave_one_out': Box(
    step_leave_one_out,
    formula='A = Σ r over the steps to go − the same of the others per place of {max_tokens}',
    tags=frozenset({'group', 'steps'}),
  ),
}
