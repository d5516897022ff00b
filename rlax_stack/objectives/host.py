"""The host's part of an objective: rewards of groups in, advantages of tokens out.

Numpy, before packing. Invariant: nothing here depends on how the batch will be packed or cut.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rlax_stack.errors import RewardError
from rlax_stack.objectives.objective import Objective
from rlax_stack.objectives.reward_batch import RewardBatch, TokenValues


class Advantages(NamedTuple):
  """Per trajectory of the batch, in its order."""

  adv_t: TokenValues  # float32, one value per trained token
  reward: np.ndarray  # float32 [B], after shaping
  keep: np.ndarray  # bool [B], False: leave the trajectory out of the loss
  state: dict[str, Any]  # of the boxes, for the next batch


def advantages_of(
  objective: Objective, batch: RewardBatch, state: Mapping[str, Any] | None = None
) -> Advantages:
  """Shapes the rewards, then estimates advantages.

  Args:
    objective: see Objective.
    batch: from `reward_batch.from_groups`.
    state: what the batch before gave; None: `Objective.init_host_state`.

  Returns: Advantages. Where shaping would leave nothing at all to train on, everything is kept
    with advantage 0: the step then moves nothing but its regularisers.

  Raises:
    ConfigError: groups that the estimator cannot take.
    RewardError: an advantage that is NaN or infinite.
  """
  carried = dict(objective.init_host_state() if state is None else state)

  def run(slot: str, batch: RewardBatch) -> Any:
    bound = objective.host_boxes[slot]
    if bound.box.host_state is None:
      return bound(batch)
    result, carried[slot] = bound(batch, state=carried[slot])
    return result

  for index in range(len(objective.shaping)):
    batch = run(f'shaping/{index}', batch)
  estimate = run('advantage', batch)
  adv_t = tuple(
    np.broadcast_to(np.asarray(value, np.float32), (length,))
    for value, length in zip(estimate, batch.length, strict=True)
  )
  if not all(np.isfinite(values).all() for values in adv_t):
    raise RewardError(
      f'{objective.advantage.name} gave an advantage that is not finite, from rewards '
      f'{batch.reward.tolist()}. Look for rewards beyond the range of float32.'
    )
  keep = batch.keep & (batch.length > 0)
  if not keep.any():
    adv_t, keep = tuple(np.zeros_like(values) for values in adv_t), batch.length > 0
  return Advantages(adv_t, batch.reward.astype(np.float32), keep, carried)
