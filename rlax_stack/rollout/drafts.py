"""Who proposes the next tokens of a row, and how many columns each row gets (numpy, on the host).

A row's own tokens go first where it is fed them again. Then come the tokens of a draft that came with the request, such
as the answer of the previous epoch (SPEC-RL, https://arxiv.org/abs/2509.23232), while the row has followed it so far;
then what followed the latest place where the row's newest tokens stood before, in its prompt, its sample or that draft
(prompt lookup). Proposals cost nothing but idle columns, and cannot change a token.
"""

from collections.abc import Mapping

import numpy as np

from rlax_stack.rollout.rows import Row
from rlax_stack.rollout.speculation import Columns

_LOOKUP = (4, 3, 2)  # newest tokens that must stand there again, longest first


def propose(row: Row, count: int, *, lookup: bool = True) -> np.ndarray:
  """Up to `count` next tokens of a row, int32, after those that it is fed again; `lookup` may take them from text."""
  tokens = row.sampled.tokens
  draft = row.request.draft_tokens
  draft = np.zeros(0, np.int32) if draft is None else np.asarray(draft, np.int32)
  if len(draft) > len(tokens) and np.array_equal(draft[: len(tokens)], tokens):
    return draft[len(tokens) : len(tokens) + count]
  if not lookup:
    return draft[:0]
  prompt = np.asarray(row.request.prompt_tokens, np.int32)
  return look_up(np.concatenate([draft, prompt, tokens]), count)


def look_up(history: np.ndarray, count: int) -> np.ndarray:
  """What followed the latest earlier place where the newest tokens of an int32 history stand; empty where none does."""
  for length in _LOOKUP:
    if len(history) <= length:
      continue
    newest = history[-length:]
    windows = np.lib.stride_tricks.sliding_window_view(history[:-1], length)
    found = np.flatnonzero((windows == newest).all(1))
    if found.size:
      start = int(found[-1]) + length
      return history[start : start + count]
  return history[:0]


def plan_columns(wishes: Mapping[int, int], *, slots: int, width: int) -> Columns:
  """Gives idle columns to rows, one at a time around, as far as each row wishes.

  Args:
    wishes: slot of every running row -> proposals that it wants checked at once.
    slots: columns there are.
    width: columns that may work for one row, its own included.
  """
  owner, offset = np.arange(slots, dtype=np.int32), np.zeros(slots, np.int32)
  used = np.zeros(slots, bool)
  of_row = np.full((slots, width), slots, np.int32)
  running = list(wishes)
  of_row[running, 0], used[running] = running, True
  idle = [slot for slot in range(slots) if slot not in wishes]
  for depth in range(1, width):
    for row, wish in wishes.items():
      if wish >= depth and idle:
        column = idle.pop()
        owner[column], offset[column], used[column] = row, depth, True
        of_row[row, depth] = column
  return Columns(owner, offset, used, of_row)


def next_wish(wish: int, offered: int, accepted: int, *, most: int) -> int:
  """How many proposals a row wants checked at once after `accepted` of `offered` ones stood; 0 at worst."""
  if not offered:
    return wish
  rate = accepted / offered
  changed = 2 * wish if rate > 0.8 else wish - 1 if rate < 0.4 else wish
  return min(most, max(0, changed))
