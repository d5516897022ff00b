"""What one trajectory of a group adds below the group's prompt: its tokens, and its trained ones.

Not for rows (`packing.py`). Invariant: the sources and nexts of a branch depend on its own trajectory alone.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from rlax_stack.errors import DataError
from rlax_stack.objectives.reward_batch import turns
from rlax_stack.types import FinishReason, Group, Trajectory

PROMPT_END, NOWHERE = -1, -2  # places of a branch beside those of its own tokens
_CUT_OFF = (FinishReason.LENGTH, FinishReason.ABORT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
  """What one trajectory adds below its prompt; `source` and `next` are relative to the branch.

  PROMPT_END stands for the prompt's last token, NOWHERE for no place. Each of its contexts is a
  child of the prompt.
  """

  trajectory: int
  tokens: np.ndarray  # int32 [C]
  contexts: tuple[slice, ...]  # of the tokens
  source: np.ndarray  # int32 [n]
  next: np.ndarray  # int32 [n], where the state after the target is
  target: np.ndarray  # int32 [n]
  behaviour: np.ndarray  # float32 [n]
  version: np.ndarray  # int32 [n]
  turn: np.ndarray  # int32 [n]
  advantage: np.ndarray  # float32 [n]
  reward: float
  kept: np.ndarray | None  # int32 [n, K]
  experts: np.ndarray | None  # int16 [P + C, L, k], of the prompt too


def make_branch(
  group: Group,
  trajectory: Trajectory,
  index: int,
  advantage: Any,
  reward: float,
  bootstrap: bool,
) -> Branch | None:
  """The branch of a trajectory that is number `index` of its batch; None where nothing of it is trained.

  Raises:
    DataError: see `packing.pack_groups`.
  """
  prompt_length = len(group.prompt_tokens)
  tokens = np.asarray(trajectory.tokens, np.int32)
  if not prompt_length or not np.array_equal(tokens[:prompt_length], group.prompt_tokens):
    raise DataError(
      f'trajectory {trajectory.trajectory_id} does not start with the {prompt_length} tokens '
      'of its prompt.'
    )
  trained = np.flatnonzero(trajectory.mask_t)
  if not trained.size:
    return None
  if trained[0] < prompt_length:
    raise DataError(
      f'trajectory {trajectory.trajectory_id} trains on token {trained[0]} of its prompt; '
      'prompts are shared by their group. Clear mask_t there.'
    )
  if trajectory.kept_overflow_t[trained].any():
    raise DataError(
      f'trajectory {trajectory.trajectory_id} trains on tokens whose kept sets had no room. Clear mask_t there.'
    )
  starts = _context_starts(trajectory, prompt_length)
  # The first token of a context is predicted where the prompt ends.
  source = np.where(
    np.isin(trained - prompt_length, starts), PROMPT_END, trained - 1 - prompt_length
  )
  source = source.astype(np.int32)
  goes_on = bootstrap and trajectory.finish_reason in _CUT_OFF
  after = len(tokens) - 1 - prompt_length if goes_on else NOWHERE
  placed = tokens[prompt_length:] if goes_on else tokens[prompt_length : trained[-1]]
  edges = np.minimum([*starts, len(placed)], len(placed)).tolist()
  return Branch(
    trajectory=index,
    tokens=placed,
    contexts=tuple(slice(start, end) for start, end in itertools.pairwise(edges)),
    source=source,
    next=np.append(source[1:], after).astype(np.int32),
    target=tokens[trained],
    behaviour=np.asarray(trajectory.behaviour_log_probs_t, np.float32)[trained],
    version=np.asarray(trajectory.version_t, np.int32)[trained],
    turn=turns(trajectory),
    advantage=_per_token(advantage, trained.size, trajectory),
    reward=reward,
    kept=None if trajectory.kept_ids_t is None else trajectory.kept_ids_t[trained],
    experts=None
    if trajectory.experts_t is None
    else trajectory.experts_t[: prompt_length + len(placed)],
  )


def _context_starts(trajectory: Trajectory, prompt_length: int) -> list[int]:
  """Where its contexts start, after the prompt, the first one at 0."""
  starts = [0, *(start - prompt_length for start in trajectory.context_starts)]
  if sorted(set(starts)) != starts or starts[-1] > len(trajectory.tokens) - prompt_length:
    raise DataError(
      f'trajectory {trajectory.trajectory_id} has contexts that start at {trajectory.context_starts}; '
      f'they must ascend between its prompt of {prompt_length} and its end at {len(trajectory.tokens)}.'
    )
  return starts


def _per_token(advantage: Any, count: int, trajectory: Trajectory) -> np.ndarray:
  values = np.asarray(advantage, np.float32)
  if values.shape not in ((), (count,)):
    raise DataError(
      f'trajectory {trajectory.trajectory_id} trains {count} tokens, but its advantages have shape '
      f'{values.shape}. Give one number, or one per trained token.'
    )
  return np.broadcast_to(values, (count,))
