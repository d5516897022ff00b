"""Host bookkeeping of the prefix table: which pages and which logits row hold which prompt, and who still needs them.

Keys contain the weights version, so a new request never meets the KV of older weights, while rows that run on go on
reading theirs. An entry without rows is kept only while `keep` says that a waiting request wants it.
Invariant: pages and rows of logits are either free or owned by exactly one entry.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from rlax_stack.pallas_kernels.decode_work import PrefixView

PrefixKey = tuple[int, bytes]


def prefix_key(version: int, prompt_tokens: np.ndarray) -> PrefixKey:
  """Identity of a prompt's KV: the weights that made it and its int32 tokens."""
  return (version, np.ascontiguousarray(prompt_tokens, np.int32).tobytes())


@dataclasses.dataclass(kw_only=True)
class Entry:
  """One stored prompt."""

  key: PrefixKey
  index: int  # row of prefix_logits
  view: PrefixView
  rows: int = 0  # slots that read it


class PrefixTable:
  """Allocates entries; `keep(key)` tells whether an entry without rows is still wanted."""

  def __init__(
    self, *, pages: int, page_size: int, entries: int, keep: Callable[[PrefixKey], bool]
  ):
    self._page_size = page_size
    self._keep = keep
    self._pages = list(range(pages))[::-1]
    self._indices = list(range(entries))[::-1]
    self._entries: dict[PrefixKey, Entry] = {}

  def __len__(self) -> int:
    return len(self._entries)

  def find(self, key: PrefixKey) -> Entry | None:
    """The entry of a key, if stored."""
    return self._entries.get(key)

  def allocate(self, key: PrefixKey, length: int) -> Entry | None:
    """A new entry for a prompt of `length` tokens, or None where there is no room until rows finish."""
    needed = -(-length // self._page_size)
    idle = [entry for entry in self._entries.values() if entry.rows == 0]
    while idle and (len(self._pages) < needed or not self._indices):
      self._free(idle.pop())
    if len(self._pages) < needed or not self._indices:
      return None
    pages = tuple(self._pages.pop() for _ in range(needed))
    entry = Entry(key=key, index=self._indices.pop(), view=PrefixView(pages=pages, length=length))
    self._entries[key] = entry
    return entry

  def acquire(self, entry: Entry) -> None:
    """One more row reads the entry."""
    entry.rows += 1

  def release(self, entry: Entry) -> None:
    """One row fewer; frees the entry when nobody needs it."""
    entry.rows -= 1
    if entry.rows == 0 and not self._keep(entry.key):
      self._free(entry)

  def sweep(self) -> None:
    """Frees every entry that has no row and is not wanted."""
    for entry in list(self._entries.values()):
      if entry.rows == 0 and not self._keep(entry.key):
        self._free(entry)

  def _free(self, entry: Entry) -> None:
    del self._entries[entry.key]
    self._pages.extend(entry.view.pages)
    self._indices.append(entry.index)
