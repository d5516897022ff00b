"""Endless iteration over a source with exact state.

Invariant: after `set_state(get_state())`, in this process or another, the same prompts come in the same order. Each
epoch visits every prompt once, in an order of its own that depends on (seed, epoch) only.
"""

from collections.abc import Iterator
from typing import Any

import grain

from rlax_stack.data.source import PromptSource
from rlax_stack.errors import CheckpointError, DataError
from rlax_stack.types import Prompt


class PromptIterator(Iterator[Prompt]):
  """Prompts of a source, reshuffled every epoch, without end. In-process: no threads, no worker processes."""

  def __init__(self, source: PromptSource, *, seed: int = 0, shuffle: bool = True):
    """`seed` (0 to 2**32 - 1) orders the epochs; without `shuffle` they follow the source."""
    if not 0 <= seed < 2**32:
      raise DataError(f'the seed of a prompt iterator must be in [0, 2**32), got {seed}.')
    self._source = source
    self._identity = {'source': source.fingerprint(), 'seed': seed, 'shuffle': shuffle}
    dataset = grain.MapDataset.source(source).seed(seed)
    dataset = dataset.shuffle() if shuffle else dataset
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._iterator = iter(dataset.repeat().to_iter_dataset(options))

  def __next__(self) -> Prompt:
    return next(self._iterator)

  def next(self) -> Prompt:
    """The next prompt."""
    return next(self._iterator)

  @property
  def num_taken(self) -> int:
    """Prompts taken so far, over all epochs."""
    return int(self._iterator.get_state()['next_index'])

  @property
  def epoch(self) -> int:
    """The epoch of the next prompt, from 0."""
    return self.num_taken // len(self._source)

  def get_state(self) -> dict[str, Any]:
    """The position as JSON values, with what it is a position in."""
    return {**self._identity, 'grain': self._iterator.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a position from `get_state`. Raises CheckpointError if it belongs to other prompts, seed or order."""
    for name, own in self._identity.items():
      if state.get(name) != own:
        raise CheckpointError(
          f'the saved position in the prompts has {name}={state.get(name)!r}, this run has {own!r}. Resume with the '
          'data config of the saved run, or start in a fresh workdir.'
        )
    self._iterator.set_state(dict(state['grain']))
