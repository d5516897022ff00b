"""Host bookkeeping: pieces of prefixes that rows share, and own pages of rows. No page is lost or owned twice."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from rlax_stack.rollout.prefix_table import PrefixTable, prefix_key
from rlax_stack.rollout.suffix_pages import SuffixPages

_CHUNK, _PAGE = 8, 4


def _table(wanted=(), pages=8, entries=4):
  return PrefixTable(
    pages=pages,
    page_size=_PAGE,
    chunk=_CHUNK,
    entries=entries,
    is_wanted=lambda key: key in wanted,
  )


def _prefix(*parts):
  """Tokens, `length` of each value."""
  return np.repeat(*np.array(parts, np.int32).T).astype(np.int32)


def _compute(pieces):
  for piece in pieces:
    piece.ready = True
  return pieces[-1]


def test_a_short_prefix_is_one_piece_shared_by_its_rows():
  table, prefix = _table(), _prefix((1, 6))
  (piece,) = table.allocate(0, prefix)
  assert (len(piece.pages), piece.view.length, piece.depth) == (2, 6, 0)
  table.acquire(piece)
  assert table.find(0, prefix) is piece
  assert table.find(1, prefix) is None  # other weights, other KV
  assert table.pages_in_use == 2
  table.release(piece)
  assert piece.is_idle and (table.pages_in_use, len(table)) == (0, 1)  # kept for whoever comes next


def test_prefixes_that_begin_alike_share_their_pieces():
  table = _table()
  first = _compute(table.allocate(0, _prefix((1, 8), (2, 8), (3, 2))))
  assert first.view.length == 18 and len(first.view.pages) == 5 and first.depth == 2
  (other,) = table.allocate(0, _prefix((1, 8), (2, 8), (4, 3)))
  assert other.all_pages[:4] == first.all_pages[:4] and other.pages != first.pages
  np.testing.assert_array_equal(other.tokens, [4, 4, 4])
  # A prefix of whole pieces ends in a piece of its own, because rows start on its logits.
  (whole,) = table.allocate(0, _prefix((1, 8)))
  assert whole.index is not None and whole.pages[0] not in first.all_pages
  assert table.allocate(1, _prefix((1, 8), (2, 8), (3, 2))) is None  # 8 pages are taken


def test_idle_pieces_go_oldest_first_and_those_that_are_wanted_last():
  wanted = {prefix_key(0, _prefix((1, 8)))}
  table = _table(wanted)
  prefixes = [_prefix((i, 8)) for i in (1, 2, 3)]
  for prefix in prefixes:
    _compute(table.allocate(0, prefix))
  table.find(0, prefixes[1])  # used more recently than 3
  table.allocate(0, _prefix((4, 16)))
  assert [table.find(0, p) is not None for p in prefixes] == [True, True, False]
  table.allocate(0, _prefix((5, 4)))
  assert [table.find(0, p) is not None for p in prefixes] == [True, False, False]


def test_pieces_about_to_be_computed_are_not_given_away():
  table = _table(pages=4)
  pieces = table.allocate(0, _prefix((1, 12)))
  assert table.allocate(0, _prefix((2, 8))) is None
  _compute(pieces)
  assert table.allocate(0, _prefix((2, 8))) is not None


def test_other_versions_are_swept_unless_rows_read_them():
  table = _table()
  old = _compute(table.allocate(0, _prefix((1, 10))))
  table.acquire(old)
  _compute(table.allocate(0, _prefix((2, 4))))
  table.sweep(1)
  assert len(table) == 2 and table.pages_in_use == 3
  table.release(old)
  table.sweep(1)
  assert (len(table), table.free_pages) == (0, 8)


@hypothesis.given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=30))
def test_every_page_has_one_owner_whatever_happens(actions):
  table, running = _table(pages=16), []
  for kind, size in actions:
    prefix = _prefix((size % 3, min(size, 16)), (size % 2, size))
    if kind < 4:
      piece = table.find(0, prefix)
      if piece is None:
        pieces = table.allocate(0, prefix)
        if pieces is None:
          continue
        piece = _compute(pieces)
      table.acquire(piece)
      running.append(piece)
    elif kind == 4 and running:
      table.release(running.pop(size % len(running)))
    elif kind == 5:
      table.sweep(1)
    owned = {page for piece in running for page in piece.all_pages}
    assert len(owned) == table.pages_in_use
    for piece in running:
      assert len(set(piece.all_pages)) == len(piece.all_pages)
      assert len(piece.all_pages) * _PAGE >= len(piece.prefix)
  for piece in running:
    table.release(piece)
  table.sweep(1)
  assert (len(table), table.free_pages) == (0, 16)


def test_pages_of_own_tokens_are_given_as_rows_grow():
  pages = SuffixPages(pages=3, page_size=4, rows=2, per_row=2)
  assert pages.grow(0, 4) and pages.missing(0, 5) == 1 and pages.grow(0, 5)
  assert not pages.grow(1, 8) and pages.num_free == 1  # nothing is given where not all is there
  assert pages.grow(1, 1)
  assert sorted([*pages.table[0], pages.table[1, 0]]) == [0, 1, 2]
  pages.release(0)
  assert pages.num_free == 2 and pages.grow(1, 8)
