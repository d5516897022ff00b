"""How much each place of packed rows counts where a sum goes over tokens: a token that stands in several rows once.

Not for the tokens that the loss trains on, which are triples. Invariant: the weights of a group's places add up to the
tokens of its trie, however it is cut into rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlax_stack.learner.tries import TrieLayout, lay_out


class PlacedTrie(NamedTuple):
  """A prompt and what is below it, at a place of a row."""

  group: int
  row: int
  start: int
  prompt: np.ndarray  # int32
  contexts: list[np.ndarray]  # int32, tokens below the prompt
  layout: TrieLayout  # of the contexts


def place_weights(shape: tuple[int, int], placed: Sequence[PlacedTrie]) -> np.ndarray:
  """Float32 of `shape` [R, T]: 1 / (rows that hold the same token of the same group), 0 at padding."""
  result = np.zeros(shape, np.float32)
  groups: dict[int, list[PlacedTrie]] = {}
  for trie in placed:
    groups.setdefault(trie.group, []).append(trie)
  for tries in groups.values():
    for trie, below in zip(tries, _below(tries), strict=True):
      prompt = np.full(len(trie.prompt), 1 / len(tries), np.float32)
      weights = np.concatenate([prompt, below])
      result[trie.row, trie.start : trie.start + len(weights)] = weights
  return result


def _below(tries: Sequence[PlacedTrie]) -> list[np.ndarray]:
  """Weights of the tokens below the prompt, for each trie of one group."""
  if len(tries) == 1:
    return [np.ones(len(tries[0].layout.tokens), np.float32)]
  whole = lay_out([context for trie in tries for context in trie.contexts])
  places = iter(whole.places)
  of_tries = [[next(places) for _ in trie.contexts] for trie in tries]
  copies = np.zeros(len(whole.tokens), np.float32)
  for in_whole in of_tries:
    copies[np.unique(np.concatenate(in_whole))] += 1
  result = []
  for trie, in_whole in zip(tries, of_tries, strict=True):
    weights = np.zeros(len(trie.layout.tokens), np.float32)
    for own, other in zip(trie.layout.places, in_whole, strict=True):
      weights[own] = 1 / copies[other]
    result.append(weights)
  return result
