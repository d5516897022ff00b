"""Sequences as a trie in depth-first order, in which what they begin with alike stands once.

Not for what is trained or how tries share rows (packing.py). Invariant: without two sequences that begin alike the
layout is the sequences one after another.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class TrieLayout(NamedTuple):
  """A trie of T tokens."""

  tokens: np.ndarray  # int32 [T]
  depth: np.ndarray  # int32 [T], from 0
  subtree_end: np.ndarray  # int32 [T], just past the last token below this one
  places: tuple[np.ndarray, ...]  # of each sequence's tokens, int32, ascending


def lay_out(sequences: Sequence[np.ndarray]) -> TrieLayout:
  """The trie of int32 sequences; children come in the order in which the sequences do."""
  places = tuple(np.zeros(len(sequence), np.int32) for sequence in sequences)
  runs: list[tuple[np.ndarray, int, list[int]]] = []  # tokens, depth, sequences through them
  size = 0
  pending = _children(sequences, range(len(sequences)), 0)
  while pending:
    members, depth = pending.pop()
    length = _agreement([sequences[i][depth:] for i in members])
    for i in members:
      places[i][depth : depth + length] = np.arange(size, size + length)
    runs.append((sequences[members[0]][depth : depth + length], depth, members))
    size += length
    pending += _children(sequences, members, depth + length)
  nothing = np.zeros(0, np.int32)
  lengths = [len(tokens) for tokens, _, _ in runs]
  ends = [max(int(places[i][-1]) + 1 for i in members) for _, _, members in runs]
  return TrieLayout(
    tokens=np.concatenate([nothing, *(tokens for tokens, _, _ in runs)]).astype(np.int32),
    depth=np.concatenate(
      [nothing, *(depth + np.arange(len(tokens)) for tokens, depth, _ in runs)]
    ).astype(np.int32),
    subtree_end=np.repeat(np.array(ends, np.int32), lengths),
    places=places,
  )


def _children(
  sequences: Sequence[np.ndarray], members: Sequence[int], depth: int
) -> list[tuple[list[int], int]]:
  """Members that go on, by their next token; the first ones last, to be popped first."""
  children: dict[int, list[int]] = {}
  for i in members:
    if depth < len(sequences[i]):
      children.setdefault(int(sequences[i][depth]), []).append(i)
  return [(child, depth) for child in reversed(children.values())]


def _agreement(sequences: Sequence[np.ndarray]) -> int:
  """How many tokens all of them begin with."""
  shortest = min(len(sequence) for sequence in sequences)
  if len(sequences) == 1:
    return shortest
  differs = np.zeros(shortest, bool)
  for sequence in sequences[1:]:
    differs |= sequence[:shortest] != sequences[0][:shortest]
  return int(differs.argmax()) if differs.any() else shortest
