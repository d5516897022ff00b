"""Host bookkeeping of the prefix table: which pages hold which pieces of which prefixes, and who still needs them.

A prefix is a chain of pieces of `chunk` tokens, the last one shorter; prefixes that begin alike share pieces. Keys
contain the weights version, so a new request never meets the KV of older weights, while rows that run on go on reading
theirs. Pieces that nobody reads stay as long as there is room (a later turn of an episode begins with them) and go
oldest first, those that waiting requests want last.
Invariant: pages and rows of logits are free or owned by exactly one piece; a piece in use keeps the pieces before it,
and one that is about to be computed stays until it is.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from rlax_stack.pallas_kernels.decode_work import PrefixView

PrefixKey = tuple[int, bytes]


def prefix_key(version: int, prefix_tokens: np.ndarray) -> PrefixKey:
  """Identity of a prefix's KV: the weights that made it and its int32 tokens."""
  return (version, np.ascontiguousarray(prefix_tokens, np.int32).tobytes())


@dataclasses.dataclass(kw_only=True, eq=False)
class Piece:
  """A stored part of a prefix, or one about to be: `ready` says that its KV is there."""

  key: PrefixKey
  prefix: np.ndarray  # int32, the prefix up to its end
  start: int  # where it begins
  parent: 'Piece | None'
  pages: tuple[int, ...]  # its own
  index: int | None  # row of prefix_logits; only the last piece of a prefix has one
  rows: int = 0  # that start after it
  followers: int = 0  # pieces that build on it
  ready: bool = False
  experts: np.ndarray | None = None  # int16 [tokens, L, k], those its tokens went through

  @property
  def is_idle(self) -> bool:
    """Whether nobody needs it."""
    return self.rows == 0 and self.followers == 0

  @property
  def tokens(self) -> np.ndarray:
    """Its own tokens."""
    return self.prefix[self.start :]

  @property
  def depth(self) -> int:
    """Pieces before it."""
    return 0 if self.parent is None else self.parent.depth + 1

  @property
  def all_pages(self) -> tuple[int, ...]:
    """Pages of the prefix up to its end."""
    return (self.parent.all_pages if self.parent else ()) + self.pages

  @property
  def all_experts(self) -> np.ndarray | None:
    """Experts of the prefix up to its end; None where they are not recorded."""
    if self.experts is None or self.parent is None or self.parent.all_experts is None:
      return self.experts
    return np.concatenate([self.parent.all_experts, self.experts])

  @property
  def view(self) -> PrefixView:
    """What a row that starts after it reads."""
    return PrefixView(pages=self.all_pages, length=len(self.prefix))


class PrefixTable:
  """Allocates pieces.

  Args:
    pages: in the table.
    page_size: tokens of one.
    chunk: tokens of a whole piece, a multiple of page_size.
    entries: rows of logits.
    is_wanted: whether a waiting request begins with a prefix of this key.
  """

  def __init__(
    self,
    *,
    pages: int,
    page_size: int,
    chunk: int,
    entries: int,
    is_wanted: Callable[[PrefixKey], bool],
  ):
    self._page_size, self._chunk = page_size, chunk
    self._is_wanted = is_wanted
    self._pages = list(range(pages))[::-1]
    self._indices = list(range(entries))[::-1]
    # By (is the last piece, version, tokens), least recently used first.
    self._pieces: dict[tuple[bool, PrefixKey], Piece] = {}

  def __len__(self) -> int:
    return len(self._pieces)

  @property
  def pages_in_use(self) -> int:
    """Pages of prefixes that rows read."""
    read = (piece for piece in self._pieces.values() if piece.rows)
    return len({page for piece in read for page in piece.all_pages})

  @property
  def free_pages(self) -> int:
    """Pages that no piece owns."""
    return len(self._pages)

  def find(self, version: int, prefix: np.ndarray) -> Piece | None:
    """The last piece of a stored prefix, if all of it is there."""
    key = (True, prefix_key(version, prefix))
    piece = self._pieces.pop(key, None)
    if piece is not None:
      self._pieces[key] = piece
    return piece

  def allocate(self, version: int, prefix: np.ndarray) -> list[Piece] | None:
    """The pieces of a prefix that are not stored, in order; None where there is no room until rows finish."""
    parent, start, missing = None, 0, []
    while len(prefix) - start > self._chunk:
      found = self._pieces.get((False, prefix_key(version, prefix[: start + self._chunk])))
      if found is None or missing:
        missing.append((start, start + self._chunk))
      else:
        parent = found
      start += self._chunk
    missing.append((start, len(prefix)))
    needed = [-(-(end - begin) // self._page_size) for begin, end in missing]
    if parent is not None:
      parent.followers += 1  # not to be given away meanwhile
    enough = self._make_room(sum(needed))
    if parent is not None:
      parent.followers -= 1
    if not enough:
      return None
    pieces = []
    for (begin, end), count in zip(missing, needed, strict=True):
      parent = self._add(version, prefix[:end], begin, parent, count, last=end == len(prefix))
      pieces.append(parent)
    return pieces

  def acquire(self, piece: Piece) -> None:
    """One more row reads the piece."""
    piece.rows += 1

  def release(self, piece: Piece) -> None:
    """One row fewer."""
    piece.rows -= 1

  def sweep(self, version: int) -> None:
    """Frees every piece of another version that nobody reads."""
    for piece in list(self._pieces.values())[
      ::-1
    ]:  # those that follow come before what they follow
      if piece.key[0] != version and piece.is_idle:
        self._free(piece)

  def _add(
    self,
    version: int,
    prefix: np.ndarray,
    start: int,
    parent: Piece | None,
    pages: int,
    *,
    last: bool,
  ) -> Piece:
    piece = Piece(
      key=prefix_key(version, prefix),
      prefix=prefix,
      start=start,
      parent=parent,
      pages=tuple(self._pages.pop() for _ in range(pages)),
      index=self._indices.pop() if last else None,
    )
    if parent is not None:
      parent.followers += 1
    self._pieces[(last, piece.key)] = piece
    return piece

  def _make_room(self, pages: int) -> bool:
    """Gives idle pieces away until there are so many pages and a row of logits; whether that was enough."""

    def enough() -> bool:
      return len(self._pages) >= pages and bool(self._indices)

    for wanted_too in (False, True):
      freed = True
      while freed and not enough():  # a piece is idle once those that follow it are gone
        freed = False
        for piece in list(self._pieces.values()):
          if enough():
            break
          if piece.ready and piece.is_idle and (wanted_too or not self._is_wanted(piece.key)):
            self._free(piece)
            freed = True
    return enough()

  def _free(self, piece: Piece) -> None:
    del self._pieces[(piece.index is not None, piece.key)]
    self._pages.extend(piece.pages)
    if piece.index is not None:
      self._indices.append(piece.index)
    if piece.parent is not None:
      piece.parent.followers -= 1
