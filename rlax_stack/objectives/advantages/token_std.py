"""Advantages that are standardised over tokens: of the whole batch, or of each task in it.

Not for standard deviations over rewards (`batch_std.py`). Invariant: a trajectory weighs in mean and
deviation by its trained tokens, those of answers that shaping leaves out of the loss included.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from rlax_stack.objectives.advantages.group import group_center, group_std
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.reward_batch import RewardBatch, TokenValues

_LEAST_VARIANCE = 1e-8


def reinforce_pp(
  batch: RewardBatch,
  *,
  gamma: Annotated[float, Range(0.0, 1.0)] = 1.0,
  kl_coef: Annotated[float, Range(0.0)] = 0.01,
) -> TokenValues:
  """Reward to go less the KL to the starting weights, standardised over the batch's tokens
  (REINFORCE++).

  Aᵢₜ = (Gᵢₜ − μ) / √max(s², 10⁻⁸),  Gᵢₜ = Σ_{s≥t} γ^{s−t} (rᵢₛ − β (log π − log π_anchor)ᵢₛ)

  r the rewards of steps where they end, without process rewards Rᵢ at the last token; μ and s² (the
  population's) over all trained tokens of the batch. No group is needed; the trained tokens of a
  trajectory follow each other, whatever lies between its turns. Divided by: the batch's standard
  deviation. Gradient flows through: nothing (numpy).
  See "REINFORCE++", Hu et al. (https://arxiv.org/abs/2501.03262).

  Args:
    batch: with scores of the current and the starting weights.
    gamma: γ, per trained token.
    kl_coef: β.

  Returns: float64, one array per trajectory.
  """
  if batch.log_probs_t is None or batch.anchor_log_probs_t is None:
    raise ValueError(
      'reinforce_pp reads log_probs_t and anchor_log_probs_t of the batch, got None. '
      "Score it first: the learner does so for boxes tagged 'host_scores'."
    )
  returns = []
  for reward_t, current, anchor in zip(
    batch.token_reward_t, batch.log_probs_t, batch.anchor_log_probs_t, strict=True
  ):
    distance_t = np.asarray(current, np.float64) - np.asarray(anchor, np.float64)
    returns.append(_to_go(reward_t - kl_coef * distance_t, gamma))
  return _standardised(returns)


def reinforce_pp_baseline(batch: RewardBatch) -> TokenValues:
  """Centred reward, standardised over the batch's tokens (REINFORCE++-baseline).

  Aᵢₜ = (Rᵢ − μ_g − μ) / √max(s², 10⁻⁸)

  μ and s² (the population's) over all trained tokens of the batch. The KL to the starting weights is
  a term of the loss here. Divided by: the batch's standard deviation. Gradient flows through: nothing
  (numpy).
  See "REINFORCE++", Hu et al. (https://arxiv.org/abs/2501.03262).

  Args:
    batch: ragged groups of at least 2.

  Returns: float64, one array per trajectory.
  """
  return _standardised(_spread(group_center(batch), batch.length))


def task_standardised(
  batch: RewardBatch,
  *,
  key: str = 'task',
  ddof: Annotated[int, Range(0, 1)] = 1,
  eps: Annotated[float, Range(0.0)] = 1e-6,
) -> TokenValues:
  """The advantage of GRPO, standardised once more over the tokens of each task (AgentRL).

  Aᵢₜ = (Âᵢ − μ_k) / (s_k + ε),  Âᵢ = (Rᵢ − μ_g) / (s_g + ε),  k the task of prompt i

  μ_k and s_k over all trained tokens of task k in the batch; with `key` a role, over those of a role.
  Divided by: the group's, then the task's standard deviation. Gradient flows through: nothing (numpy).
  See "AgentRL", Zhang et al. (https://arxiv.org/abs/2510.04206), task advantage normalisation.

  Args:
    batch: ragged groups of at least 2.
    key: of the prompts' metadata; prompts without it are one task.
    ddof: 1 for the sample's standard deviations, 0 for the population's.
    eps: added to the standard deviations.

  Returns: float64, one array per trajectory.
  """
  adv = group_std(batch, ddof=ddof, eps=eps)
  tasks = np.array([repr(metadata.get(key)) for metadata in batch.metadata])
  out = np.zeros(adv.shape)
  for task in np.unique(tasks):
    member = tasks == task
    tokens = np.repeat(adv[member], batch.length[member])
    if tokens.size > 1 and not (tokens == tokens[0]).all():
      out[member] = (adv[member] - tokens.mean()) / (tokens.std(ddof=ddof) + eps)
  return _spread(out, batch.length)


def _to_go(reward_t: np.ndarray, gamma: float) -> np.ndarray:
  """Discounted sum of what is still to come, at every token."""
  if gamma == 1.0:
    return np.cumsum(reward_t[::-1])[::-1]
  out, running = np.empty(reward_t.shape), 0.0
  for place in range(reward_t.size - 1, -1, -1):
    running = reward_t[place] + gamma * running
    out[place] = running
  return out


def _standardised(values: Sequence[np.ndarray]) -> TokenValues:
  """Mean 0 and variance 1 over all tokens; exactly 0 where all are equal."""
  tokens = np.concatenate(values)
  if not tokens.size or (tokens == tokens[0]).all():
    return tuple(np.zeros(value.shape) for value in values)
  scale = np.sqrt(max(tokens.var(), _LEAST_VARIANCE))
  return tuple((value - tokens.mean()) / scale for value in values)


def _spread(values: np.ndarray, length: np.ndarray) -> TokenValues:
  return tuple(np.full(n, value) for value, n in zip(values, length, strict=True))


_GROUP_AND_BATCH = frozenset({'group', 'batch'})

TABLE = {
  'reinforce_pp': Box(
    reinforce_pp,
    formula='A = (Σ γ(={gamma:g}) to go of R − {kl_coef:g}·KL − μ)/s over tokens',
    tags=frozenset({'host_scores', 'batch'}),
  ),
  'reinforce_pp_baseline': Box(
    reinforce_pp_baseline, formula='A = (R − μ_g − μ)/s over tokens', tags=_GROUP_AND_BATCH
  ),
  'task_standardised': Box(
    task_standardised,
    formula='A = ((R − μ_g)/(s_g + {eps:g}) − μ)/(s + {eps:g}) over the tokens of each {key}',
    tags=_GROUP_AND_BATCH,
  ),
}
