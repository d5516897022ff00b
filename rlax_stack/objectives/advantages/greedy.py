"""Advantages over the reward of a greedy sample of the same prompt.

Not for how that sample is drawn (rollout/worker.py). Invariant: the baseline is no sample of the group,
so it is independent of what is trained on and a group of one is enough.
"""

import numpy as np

from rlax_stack.errors import DataError
from rlax_stack.objectives.boxes import Box
from rlax_stack.objectives.reward_batch import RewardBatch


def greedy_baseline(batch: RewardBatch) -> np.ndarray:
  """Reward minus that of the answer that greedy decoding gives to the prompt (ReMax).

  Aᵢ = Rᵢ − R(ŷ),  ŷₜ = argmax π(· | x, ŷ₍ₛ₎, s < t)

  Shaping changes Rᵢ and leaves R(ŷ) as the verifiers gave it. Divided by: nothing. Gradient flows
  through: nothing (numpy).
  See "ReMax", Li et al. (https://arxiv.org/abs/2310.10505), algorithm 1.

  Args:
    batch: with rewards of greedy samples; groups of 1 or more.

  Returns: float64 [B].

  Raises:
    DataError: a group without a greedy sample.
  """
  if batch.greedy_reward is None:
    raise DataError(
      'greedy_baseline compares with a greedy sample, but a group of the batch has none. '
      "The coordinator asks for one where greedy=True, as assembly sets it for boxes tagged 'greedy'."
    )
  return batch.reward - batch.greedy_reward


TABLE = {
  'greedy_baseline': Box(greedy_baseline, formula='A = R − R(greedy)', tags=frozenset({'greedy'})),
}
