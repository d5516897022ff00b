"""Samples on the host, and slots that have no room."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.rollout.decode_batch import DecodeBatch, SchedulerStats
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.requests import check_partial
from rlax_stack.rollout.rows import Row, Sampled, nothing, row_of


def _sampled(*tokens, version=0):
  tokens = np.array(tokens, np.int32)
  floats = -np.arange(1.0, 1.0 + len(tokens)).astype(np.float32)
  return Sampled(tokens, floats, floats, np.full(len(tokens), version, np.int32))


def test_the_same_weights_feed_a_row_its_tokens_and_others_compute_them_anew(tiny):
  request = tiny.request(0, 0)
  row = Row(request, 0, parts=[_sampled(4, 5), _sampled(6)])
  assert (row.length, row.sampled.tokens.tolist()) == (3, [4, 5, 6])
  row.recomputed, row.kv_version = 1, 2
  row.fed = 2
  row.set_back()
  row.begin(2)
  np.testing.assert_array_equal(row.prefix, [*request.prompt_tokens, 4])
  np.testing.assert_array_equal(row.forced(5), [5, 6])
  assert row.left == 11
  row.begin(3)
  np.testing.assert_array_equal(row.prefix, [*request.prompt_tokens, 4, 5, 6])
  assert (row.forced(5).size, row.left, row.kv_version) == (0, 9, 3)


def test_a_row_survives_its_journey(tiny):
  row = Row(tiny.request(0, 0), 5, parts=[_sampled(4, 5, 6)], recomputed=2, kv_version=1)
  partial = row.partial(9)
  check_partial(partial, tiny.MODEL, tiny.SIZES)
  assert partial.request.sampling.seed == 9
  again = row_of(partial, 7)
  assert (again.order, again.recomputed, again.kv_version) == (7, 2, 1)
  for got, want in zip(again.sampled[:4], row.sampled[:4], strict=True):
    np.testing.assert_array_equal(got, want)
  assert row_of(Row(tiny.request(0, 1), 0).partial(0), 0).length == 0
  assert nothing().part(slice(3)).tokens.shape == (0,)


def test_a_stop_string_cuts_after_the_token_that_completes_it(tiny):
  def text(ids):
    return ''.join('abcdef'[i] for i in ids)

  row = Row(tiny.request(0, 0, stop_strings=('cd',)), 0, parts=[_sampled(0, 1, 2)])
  assert not row.cut_at_stop_string(3, text)
  row.parts.append(_sampled(3, 4, 5))
  assert row.cut_at_stop_string(3, text)
  assert row.sampled.tokens.tolist() == [0, 1, 2, 3]


def _batch(tiny, engine=None):
  engine = engine or tiny.engine()
  batch = DecodeBatch(
    engine,
    run_seed=0,
    decode_text=None,
    is_wanted=lambda key: False,
    stats=SchedulerStats(),
  )
  batch.load(engine.load_params(tiny.params()), 0)
  return batch


def test_what_finds_no_room_is_given_nothing(tiny):
  batch = _batch(tiny)
  rows = [Row(tiny.request(0, i, max_tokens=20), i) for i in range(9)]
  assert [batch.place(row) for row in rows] == [True] * 8 + [False]
  assert rows[8].piece is None and batch.num_rows == 8
  assert batch.start() == []
  assert all(row.started and row.length == 1 for row in rows[:8])
  removed = batch.remove(3)
  assert (removed.piece, removed.started, removed.length) == (None, False, 1)
  assert batch.place(rows[8])
  assert {row.request.sample_index for _, row in batch.rows} == {0, 1, 2, 4, 5, 6, 7, 8}


def test_the_youngest_rows_make_room(tiny):
  """Seven pages: three rows that want three of them each cannot all stay."""
  engine = Engine(tiny.MODEL, dataclasses.replace(tiny.SIZES, suffix_pages=7))
  batch = _batch(tiny, engine)
  rows = [Row(tiny.request(0, i, max_tokens=20), 10 - i) for i in range(3)]
  for row in rows:
    batch.place(row)
  batch.start()
  assert batch.pages.num_free == 4  # each has a page for its first chunk
  assert batch.make_room(20) == [rows[0]]
  assert [row for _, row in batch.rows] == rows[1:]
  assert batch.pages.num_free == 1


def test_an_empty_slot_has_no_row(tiny):
  with pytest.raises(ValueError, match='slot 3 is free'):
    _batch(tiny).remove(3)
