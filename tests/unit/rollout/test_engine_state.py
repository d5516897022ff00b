"""Static sizes, host bookkeeping of the prefix table, and checks of requests."""

import numpy as np
import pytest

from rlax_stack import rng
from rlax_stack.errors import ConfigError, PromptTooLongError
from rlax_stack.rollout.engine_state import EngineConfig, empty_rows, empty_state
from rlax_stack.rollout.new_rows import make_new_rows
from rlax_stack.rollout.prefix_table import PrefixTable, prefix_key
from rlax_stack.rollout.requests import check_request


def test_sizes_are_chosen_from_the_longest_prompt_and_sample():
  small = EngineConfig(slots=64, max_prompt_tokens=60, max_new_tokens=5)
  assert (small.page_size, small.suffix_block, small.prefix_pages) == (64, 8, 64)
  assert (small.pages_per_prompt, small.suffix_blocks, small.max_items) == (1, 1, 64)
  assert small.prompt_buckets == (64,)
  assert small.prefill_batches(64) == (4,)
  large = EngineConfig(slots=64, max_prompt_tokens=1024, max_new_tokens=64)
  assert (large.page_size, large.suffix_block, large.prefix_pages) == (256, 16, 128)
  few = EngineConfig(slots=16, max_prompt_tokens=1024, max_new_tokens=500)
  assert (few.suffix_block, few.suffix_blocks) == (64, 8)
  assert large.prompt_buckets == (256, 1024)
  assert large.prefill_batches(1024) == (1,)


@pytest.mark.parametrize(
  'changes, match',
  [
    ({'slots': 0}, 'slots must be at least 1, got 0'),
    ({'chunk_steps': -1}, 'chunk_steps'),
    ({'max_prompt_tokens': 1024, 'prefix_pages': 3}, 'prefix_pages to at least 4'),
  ],
)
def test_impossible_sizes_are_refused(changes, match):
  with pytest.raises(ConfigError, match=match):
    EngineConfig(**changes)


def test_state_has_the_documented_shapes(tiny):
  state = empty_state(tiny.MODEL, tiny.SIZES)
  assert state.prefix_k.shape == (2, 16, 2, 16, 8)
  assert state.prefix_logits.shape == (8, 97)
  assert state.suffix_v.shape == (2, 3, 8, 2, 8, 8)
  rows = empty_rows(tiny.SIZES)
  assert not rows.active.any()
  assert (rows.stop_ids == -1).all()


def _table(wanted=(), pages=4, entries=4):
  return PrefixTable(pages=pages, page_size=8, entries=entries, keep=lambda key: key in wanted)


def _key(tiny, version=0, seed=0):
  return prefix_key(version, tiny.prompt(seed, 9))


def test_entries_are_shared_counted_and_freed(tiny):
  table, key = _table(), _key(tiny)
  entry = table.allocate(key, 9)
  assert len(entry.view.pages) == 2 and entry.view.length == 9
  table.acquire(entry)
  table.acquire(entry)
  assert table.find(key) is entry
  assert table.find(_key(tiny, version=1)) is None  # other weights, other KV
  table.release(entry)
  assert len(table) == 1
  table.release(entry)
  assert len(table) == 0 and table.find(key) is None


def test_no_page_has_two_owners_and_none_is_lost(tiny):
  table = _table()
  first, second = table.allocate(_key(tiny, 0), 16), table.allocate(_key(tiny, 1), 9)
  assert sorted(first.view.pages + second.view.pages) == [0, 1, 2, 3]
  table.acquire(first)
  table.acquire(second)
  assert table.allocate(_key(tiny, 2), 1) is None
  table.release(first)
  third = table.allocate(_key(tiny, 2), 16)
  assert sorted(third.view.pages) == sorted(first.view.pages)


def test_wanted_entries_stay_until_room_is_needed_or_they_go_stale(tiny):
  wanted = {_key(tiny)}
  table = _table(wanted)
  entry = table.allocate(_key(tiny), 16)
  table.acquire(entry)
  table.release(entry)
  assert table.find(_key(tiny)) is entry
  wanted.clear()
  table.sweep()
  assert table.find(_key(tiny)) is None
  wanted.add(_key(tiny))
  entry = table.allocate(_key(tiny), 16)
  assert len(table.allocate(_key(tiny, 1), 32).view.pages) == 4  # evicts the idle one
  assert table.find(_key(tiny)) is None


def test_check_request_names_the_context(tiny):
  check_request(tiny.request(0), tiny.MODEL, tiny.SIZES)
  sizes = EngineConfig(max_prompt_tokens=256, max_new_tokens=64)
  with pytest.raises(PromptTooLongError, match='120 tokens and up to 12 .* 128'):
    check_request(tiny.request(0, tokens=tiny.prompt(0, 120)), tiny.MODEL, sizes)


def test_new_rows_carry_each_requests_own_parameters(tiny):
  first = tiny.request(4, 2, temperature=0.5, top_k=3, top_p=0.75, stop_token_ids=(9, 8))
  second = tiny.request(5, 0, min_p=0.25, max_tokens=3, seed=11)
  new = make_new_rows(tiny.SIZES, {6: (first, 1), 2: (second, 0)}, run_seed=1)
  np.testing.assert_array_equal(np.flatnonzero(new.start), [2, 6])
  assert (new.entry[6], new.max_tokens[6], new.prompt_length[6]) == (1, 12, 9)
  assert tuple(column[6] for column in new.sampling) == (0.5, 3, 0.75, 0.0)
  assert tuple(column[2] for column in new.sampling) == (1.0, 0, 1.0, 0.25)
  np.testing.assert_array_equal(new.stop_ids[6], [9, 8] + [-1] * 6)
  np.testing.assert_array_equal(new.key[6], rng.sample_key_data(1, 4, 2))
  np.testing.assert_array_equal(new.key[2], rng.sample_key_data(11, 5, 0))
