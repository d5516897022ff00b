"""Host bookkeeping of the pages that hold rows' own tokens.

Invariant: a page is free or belongs to one row; the table that the device reads names only pages of the row it reads.
"""

import numpy as np


class SuffixPages:
  """Gives pages to rows as they grow.

  Args:
    pages: in the pool.
    page_size: tokens of one.
    rows: slots.
    per_row: pages of the longest row.
  """

  def __init__(self, *, pages: int, page_size: int, rows: int, per_row: int):
    self._page_size = page_size
    self._free = list(range(pages))[::-1]
    self._owned: list[list[int]] = [[] for _ in range(rows)]
    self.table = np.zeros(
      (rows, per_row), np.int32
    )  # of each row, in order; 0 where it has none yet

  @property
  def num_free(self) -> int:
    """Pages that no row has."""
    return len(self._free)

  def missing(self, row: int, tokens: int) -> int:
    """Pages that a row lacks to hold so many tokens."""
    return max(0, -(-tokens // self._page_size) - len(self._owned[row]))

  def grow(self, row: int, tokens: int) -> bool:
    """Gives a row the pages for so many tokens; False, and nothing given, where there are not enough."""
    missing = self.missing(row, tokens)
    if missing > len(self._free):
      return False
    for _ in range(missing):
      page = self._free.pop()
      self.table[row, len(self._owned[row])] = page
      self._owned[row].append(page)
    return True

  def release(self, row: int) -> None:
    """Takes a row's pages back."""
    self._free.extend(self._owned[row][::-1])
    self._owned[row] = []
    self.table[row] = 0
