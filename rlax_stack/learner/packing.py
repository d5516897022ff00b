"""Packs groups of trajectories into rows of token tries: each prompt once, its completions one
after another. What completions of a row share beyond the prompt stands once, too.

Numpy, on the host; not for advantages or device placement. Invariants: every trained token of every
trajectory is the target of exactly one triple; a triple's source sees exactly the tokens before its
target in the trajectory; and the result depends on nothing but the arguments.

The last trained token of a trajectory predicts nothing, and what follows it trains nothing, so
neither is given a place in the row: the token lives in its triple's `target_t`. Only where a critic
is to value what would have followed a cut-off trajectory do they get their places (`bootstrap`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlax_stack.errors import ConfigError, DataError
from rlax_stack.learner.branches import Branch, make_branch
from rlax_stack.learner.place_weights import PlacedTrie, place_weights
from rlax_stack.learner.tries import TrieLayout, lay_out
from rlax_stack.models.config import ModelConfig
from rlax_stack.types import Group, PackedBatch

# For each group one entry per trajectory: a number, or an array with a value per trained token.
Advantages = Sequence[Sequence[Any] | np.ndarray]


class RowShape(NamedTuple):
  """Static shape of a row: `length` tokens (T) and `triples` targets (N)."""

  length: int
  triples: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trie:
  """A prompt and some of its group's branches: what is placed as one piece."""

  group: int
  prompt: np.ndarray  # int32 [P]
  branches: tuple[Branch, ...]

  @functools.cached_property
  def layout(self) -> TrieLayout:
    """What is below the prompt: the contexts of the first branch, of the second, and so on."""
    return lay_out(self.contexts)

  @property
  def contexts(self) -> list[np.ndarray]:
    return [branch.tokens[part] for branch in self.branches for part in branch.contexts]

  @property
  def shape(self) -> RowShape:
    length = len(self.prompt) + len(self.layout.tokens)
    return RowShape(length, sum(len(branch.target) for branch in self.branches))


def pack_groups(
  groups: Sequence[Group],
  advantages: Advantages,
  *,
  row_shapes: Sequence[RowShape],
  rows_multiple: int = 1,
  rewards: Sequence[np.ndarray] | None = None,
  bootstrap: bool = False,
  weigh_places: bool = False,
) -> PackedBatch:
  """Packs whole groups, several to a row where they fit (first fit, largest first).

  One row shape serves the whole batch: the smallest in which every group fits, or else the largest,
  with the groups that do not fit split over rows and their prompt repeated. Trajectories without a
  trained token are left out. `trajectory_t` counts the trajectories of the batch in the order
  given, those included.

  Args:
    groups: ragged; tokens of each trajectory start with its group's `prompt_tokens`.
    advantages: for each group one entry per trajectory: a number, or an array with a value per
      trained token.
    row_shapes: the buckets, any order.
    rows_multiple: empty rows are added until the number of rows divides by it.
    rewards: for each group float [G], for `reward_t`; 0 when None.
    bootstrap: True gives the tokens of cut-off trajectories their places to the very last, and
      points `next_index_t` of the last triple there.
    weigh_places: whether `place_weight` is made.

  Returns:
    PackedBatch of numpy arrays; log-probs that are not known yet are 0.

  Raises:
    DataError: a trajectory that does not start with its prompt, trains on it, or trains on a token
      whose kept set had no room; nothing to train on.
    ConfigError: a trajectory that fits in no row shape.
  """
  tries = _make_tries(groups, advantages, rewards, separate=False, bootstrap=bootstrap)
  return _pack(groups, tries, row_shapes, rows_multiple, separate=False, weigh_places=weigh_places)


def pack_separate(
  groups: Sequence[Group],
  advantages: Advantages,
  *,
  row_shapes: Sequence[RowShape],
  rows_multiple: int = 1,
  rewards: Sequence[np.ndarray] | None = None,
  bootstrap: bool = False,
  weigh_places: bool = False,
) -> PackedBatch:
  """`pack_groups` with one trajectory a row: nothing shared, the layout to compare with."""
  tries = _make_tries(groups, advantages, rewards, separate=True, bootstrap=bootstrap)
  return _pack(groups, tries, row_shapes, rows_multiple, separate=True, weigh_places=weigh_places)


def pairs_per_layer(batch: PackedBatch, config: ModelConfig) -> float:
  """Pairs of tokens that see each other, mean over the layers of a model."""
  if config.sliding_window is None:
    return seen_pairs(batch)
  whole = len(config.global_layers) / config.num_layers
  return whole * seen_pairs(batch) + (1 - whole) * seen_pairs(batch, config.sliding_window)


def pad_rows(batch: PackedBatch, num_rows: int) -> PackedBatch:
  """Adds empty rows until there are `num_rows` (ValueError where there are already more)."""
  rows, length = batch.tokens.shape
  if num_rows < rows:
    raise ValueError(f'the batch has {rows} rows, more than {num_rows=}.')
  shape = RowShape(length, batch.target_t.shape[1])
  kept_tokens = 0 if batch.kept_ids_t is None else batch.kept_ids_t.shape[2]
  routed = None if batch.experts is None else batch.experts.shape[2:]
  empty = empty_batch(num_rows - rows, shape, kept_tokens, routed)
  if batch.place_weight is not None:
    empty = empty._replace(place_weight=np.zeros(empty.tokens.shape, np.float32))
  # Fields that are None and mappings that are empty hold no array.
  return jax.tree.map(lambda a, b: np.concatenate([a, b], axis=0), batch, empty)


def packing_stats(batch: PackedBatch) -> dict[str, int]:
  """Tokens of the rows in use, targets in use, and the places for both; int."""
  return {
    'row_tokens': int(np.sum(_in_use(batch))),
    'targets': int(batch.mask_t.sum()),
    'row_places': int(batch.tokens.size),
    'target_places': int(batch.target_t.size),
  }


def seen_pairs(batch: PackedBatch, window: int | None = None) -> int:
  """Pairs of a token and one that it sees, itself included, in one layer; with a window, within that."""
  # A token sees the path from its root, which is as long as its position says.
  seen = batch.positions.astype(np.int64) + 1
  if window is not None:
    seen = np.minimum(seen, window)
  return int(np.sum(seen[_in_use(batch)]))


def _in_use(batch: PackedBatch) -> np.ndarray:
  """Places that hold a token, bool [R, T]."""
  end = np.arange(batch.tokens.shape[1]) + 1
  # A leaf token looks like padding by its subtree; it is told apart by its position.
  return (batch.subtree_end > end) | ((batch.subtree_end == end) & (batch.positions > 0))


def _pack(groups, tries, row_shapes, rows_multiple, *, separate, weigh_places) -> PackedBatch:
  if not tries:
    overflow = any(t.kept_overflow_t.any() for group in groups for t in group.trajectories)
    cure = ' Kept sets had no room: raise config.rollout.kept_tokens.' if overflow else ''
    raise DataError(f'no token of the batch is trained on: every mask_t is empty.{cure}')
  shape = _choose_shape(tries, row_shapes)
  pieces = [piece for trie in tries for piece in _split(trie, shape)]
  rows = [[piece] for piece in pieces] if separate else _first_fit_decreasing(pieces, shape)
  num_rows = -(-len(rows) // rows_multiple) * rows_multiple
  num_trajectories = sum(len(group.trajectories) for group in groups)
  if num_trajectories > num_rows * shape.triples:
    raise DataError(
      f'{num_trajectories} trajectories train fewer tokens than there are trajectories.'
    )
  kept = (branch.kept for trie in tries for branch in trie.branches if branch.kept is not None)
  routed = {b.experts.shape[1:] for trie in tries for b in trie.branches if b.experts is not None}
  if len(routed) > 1:
    raise DataError(f'trajectories were routed by models of different shapes, {sorted(routed)}.')
  widest = max((ids.shape[1] for ids in kept), default=0)
  batch = empty_batch(num_rows, shape, widest, next(iter(routed), None))
  placed = []
  for row, tries_of_row in enumerate(rows):
    start, triple = 0, 0
    for trie in tries_of_row:
      placed.append(PlacedTrie(trie.group, row, start, trie.prompt, trie.contexts, trie.layout))
      start, triple = _write(batch, row, start, triple, trie)
  weights = place_weights(batch.tokens.shape, placed) if weigh_places else None
  return batch._replace(place_weight=weights)


def _make_tries(groups, advantages, rewards, *, separate, bootstrap) -> list[_Trie]:
  """One trie per group, or one per trajectory, without the trajectories that train nothing."""
  tries, first = [], 0
  if rewards is None:
    rewards = [np.zeros(len(group.trajectories), np.float32) for group in groups]
  for index, (group, advantage, reward) in enumerate(zip(groups, advantages, rewards, strict=True)):
    if len(advantage) != len(group.trajectories):
      raise DataError(
        f'group {group.group_id} has {len(group.trajectories)} trajectories '
        f'and {len(advantage)} advantages.'
      )
    prompt = np.asarray(group.prompt_tokens, np.int32)
    made = (
      make_branch(group, trajectory, first + i, advantage[i], float(reward[i]), bootstrap)
      for i, trajectory in enumerate(group.trajectories)
    )
    branches = tuple(branch for branch in made if branch is not None)
    first += len(group.trajectories)
    parts = [(branch,) for branch in branches] if separate else [branches] if branches else []
    tries += [_Trie(group=index, prompt=prompt, branches=part) for part in parts]
  return tries


def _fits(need: RowShape, shape: RowShape) -> bool:
  return need.length <= shape.length and need.triples <= shape.triples


def _choose_shape(tries: Sequence[_Trie], row_shapes: Sequence[RowShape]) -> RowShape:
  buckets = sorted(RowShape(*shape) for shape in row_shapes)
  whole = [shape for shape in buckets if all(_fits(trie.shape, shape) for trie in tries)]
  return whole[0] if whole else buckets[-1]


def _split(trie: _Trie, shape: RowShape) -> list[_Trie]:
  """Cuts a trie that does not fit into tries that do, in order, each with the whole prompt."""
  parts, current = [], ()
  for branch in trie.branches:
    if not _fits(dataclasses.replace(trie, branches=(branch,)).shape, shape):
      need = dataclasses.replace(trie, branches=(branch,)).shape
      raise ConfigError(
        f'a trajectory needs {need.length} row tokens and {need.triples} targets, but the longest '
        f'row has {shape.length} and {shape.triples}. Raise config.learner.row_length, or lower '
        'max_tokens.'
      )
    grown = (*current, branch)
    if current and not _fits(dataclasses.replace(trie, branches=grown).shape, shape):
      parts.append(current)
      grown = (branch,)
    current = grown
  return [dataclasses.replace(trie, branches=part) for part in (*parts, current)]


def _first_fit_decreasing(pieces: Sequence[_Trie], shape: RowShape) -> list[list[_Trie]]:
  """Rows of pieces; ties keep the order given, so that the result is deterministic."""
  rows: list[list[_Trie]] = []
  used: list[RowShape] = []
  for piece in sorted(pieces, key=lambda piece: -piece.shape.length):
    need = piece.shape
    for i, taken in enumerate(used):
      both = RowShape(taken.length + need.length, taken.triples + need.triples)
      if _fits(both, shape):
        rows[i].append(piece)
        used[i] = both
        break
    else:
      rows.append([piece])
      used.append(need)
  return rows


def empty_batch(
  num_rows: int,
  shape: RowShape,
  kept_tokens: int = 0,
  routed: tuple[int, int] | None = None,
) -> PackedBatch:
  """Rows of padding.

  With `kept_tokens` there is room for kept sets of so many ids, with `routed`, (L, k), for experts.
  """
  tokens, triples = (num_rows, shape.length), (num_rows, shape.triples)

  def zeros(dtype):
    return np.zeros(triples, dtype)

  return PackedBatch(
    tokens=np.zeros(tokens, np.int32),
    positions=np.zeros(tokens, np.int32),
    # Padding sees itself, so that no softmax is empty.
    subtree_end=np.tile(np.arange(1, shape.length + 1, dtype=np.int32), (num_rows, 1)),
    source_index_t=zeros(np.int32),
    target_t=zeros(np.int32),
    mask_t=zeros(bool),
    trajectory_t=np.full(triples, -1, np.int32),
    group_t=np.full(triples, -1, np.int32),
    turn_t=zeros(np.int32),
    adv_t=zeros(np.float32),
    reward_t=zeros(np.float32),
    behaviour_log_probs_t=zeros(np.float32),
    proximal_log_probs_t=zeros(np.float32),
    anchor_log_probs_t=zeros(np.float32),
    version_t=np.full(triples, -1, np.int32),
    next_index_t=np.full(triples, -1, np.int32),
    kept_ids_t=np.full((*triples, kept_tokens), -1, np.int32) if kept_tokens else None,
    experts=None if routed is None else np.full((*tokens, *routed), -1, np.int16),
  )


def _write(batch: PackedBatch, row: int, start: int, triple: int, trie: _Trie) -> tuple[int, int]:
  """Writes one trie at token `start` and triple `triple` of a row.

  Returns where the next one goes.
  """
  end, below = start + trie.shape.length, start + len(trie.prompt)
  layout = trie.layout
  batch.tokens[row, start:end] = np.concatenate([trie.prompt, layout.tokens])
  batch.positions[row, start:below] = np.arange(len(trie.prompt))
  batch.positions[row, below:end] = len(trie.prompt) + layout.depth
  batch.subtree_end[row, start:below] = end
  batch.subtree_end[row, below:end] = below + layout.subtree_end
  contexts = iter(layout.places)
  for branch in trie.branches:
    places = np.concatenate([next(contexts) for _ in branch.contexts])
    # The last two entries are those of NOWHERE and PROMPT_END.
    in_row = np.concatenate([below + places, [-1, below - 1]])
    there = slice(triple, triple + len(branch.target))
    batch.source_index_t[row, there] = in_row[branch.source]
    batch.next_index_t[row, there] = in_row[branch.next]
    batch.target_t[row, there] = branch.target
    batch.mask_t[row, there] = True
    batch.trajectory_t[row, there] = branch.trajectory
    batch.group_t[row, there] = trie.group
    batch.turn_t[row, there] = branch.turn
    batch.adv_t[row, there] = branch.advantage
    batch.reward_t[row, there] = branch.reward
    batch.behaviour_log_probs_t[row, there] = branch.behaviour
    batch.version_t[row, there] = branch.version
    if branch.kept is not None:
      batch.kept_ids_t[row, there, : branch.kept.shape[1]] = branch.kept
    if branch.experts is not None:
      at = np.concatenate([np.arange(start, below), below + places])
      # Samples that share a place went the same way but for near ties: the first one's is taken.
      free = batch.experts[row, at, 0, 0] < 0
      batch.experts[row, at[free]] = branch.experts[free]
    triple += len(branch.target)
  return end, triple
