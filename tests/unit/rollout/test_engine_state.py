"""Static sizes, checks of requests, and rows that start."""

import dataclasses

import numpy as np
import pytest

from rlax_stack import rng
from rlax_stack.errors import ConfigError, PromptTooLongError
from rlax_stack.rollout.engine_state import EngineConfig, empty_result, empty_rows, empty_state
from rlax_stack.rollout.new_rows import make_new_rows
from rlax_stack.rollout.prefix_table import Piece, prefix_key
from rlax_stack.rollout.requests import changes_logits, check_request
from rlax_stack.rollout.rows import Row, Sampled


def test_sizes_are_chosen_from_the_longest_prompt_and_sample():
  small = EngineConfig(slots=64, max_prompt_tokens=60, max_new_tokens=5)
  assert (small.page_size, small.suffix_page_size, small.prefix_pages) == (64, 8, 64)
  assert (small.pages_per_prompt, small.pages_per_sample, small.max_items) == (1, 1, 64)
  assert small.prompt_buckets == (64,)
  assert small.prefill_batches(64) == (4,)
  large = EngineConfig(slots=64, max_prompt_tokens=1024, max_new_tokens=64)
  assert (large.page_size, large.suffix_page_size, large.prefix_pages) == (256, 16, 128)
  few = EngineConfig(slots=16, max_prompt_tokens=1024, max_new_tokens=500)
  assert (few.suffix_page_size, few.pages_per_sample, few.suffix_pages) == (64, 8, 128)
  assert (few.max_prefix_tokens, few.pages_per_prefix) == (1523, 6)
  assert large.prompt_buckets == (256, 1024)
  assert large.prefill_batches(1024) == (1,)
  long = EngineConfig(max_prompt_tokens=8192)
  assert (long.prefill_chunk, long.prompt_buckets) == (2048, (512, 2048))


@pytest.mark.parametrize(
  'changes, match',
  [
    ({'slots': 0}, 'slots must be at least 1, got 0'),
    ({'chunk_steps': -1}, 'chunk_steps'),
    ({'max_prompt_tokens': 1024, 'prefix_pages': 3}, 'prefix_pages to at least 4'),
    ({'suffix_pages': 3, 'suffix_page_size': 16}, 'suffix_pages to at least 4'),
    ({'prefill_chunk': 100}, 'prefill_chunk=100 must be a multiple of page_size=256'),
  ],
)
def test_impossible_sizes_are_refused(changes, match):
  with pytest.raises(ConfigError, match=match):
    EngineConfig(**changes)


def test_state_has_the_documented_shapes(tiny):
  state = empty_state(tiny.MODEL, tiny.SIZES)
  assert state.prefix_k.shape == (2, 16, 2, 16, 8)
  assert state.prefix_logits.shape == (8, 97)
  assert state.suffix_v.shape == (2, 24, 2, 8, 8)
  rows = empty_rows(tiny.SIZES, 97)
  assert rows.controls is None
  assert not rows.active.any()
  assert (rows.stop_ids == -1).all()


def test_results_have_room_for_what_is_recorded_alone(tiny):
  sizes = tiny.SIZES
  finish = np.full(8, 2, np.int32)
  result = empty_result(tiny.MODEL, sizes, (2, 3), finish, np.int32(7))
  assert result.top_ids is None and result.kept_ids is None and result.experts is None
  assert result.versions.tolist() == [[7] * 3] * 2 and not result.valid.any()
  recording = dataclasses.replace(sizes, max_top_log_probs=4, kept_tokens=5, record_experts=True)
  mixture = dataclasses.replace(
    tiny.MODEL, num_experts=4, experts_per_token=3, moe_intermediate_size=8
  )
  result = empty_result(mixture, recording, (2, 3), finish, np.int32(7))
  assert result.top_ids.shape == result.top_log_probs.shape == (2, 3, 4)
  assert result.kept_ids.shape == (2, 3, 5) and (result.kept_ids == -1).all()
  assert result.experts.shape == (2, 3, 2, 3) and (result.experts == -1).all()
  assert result.finish is finish


def test_check_request_names_the_context(tiny):
  check_request(tiny.request(0), tiny.MODEL, tiny.SIZES)
  sizes = EngineConfig(max_prompt_tokens=256, max_new_tokens=64)
  with pytest.raises(PromptTooLongError, match='120 tokens and up to 12 .* 128'):
    check_request(tiny.request(0, tokens=tiny.prompt(0, 120)), tiny.MODEL, sizes)


def _placed(request, index, **fields):
  """A row whose prefix is stored, its logits in row `index`."""
  row = Row(request, 0, **fields)
  row.piece = Piece(
    key=prefix_key(0, row.prefix), prefix=row.prefix, start=0, parent=None, pages=(0,), index=index
  )
  return row


def test_new_rows_carry_each_requests_own_parameters(tiny):
  first = tiny.request(4, 2, temperature=0.5, top_k=3, top_p=0.75, stop_token_ids=(9, 8))
  second = tiny.request(5, 0, min_p=0.25, max_tokens=3, seed=11)
  rows = {6: _placed(first, 1), 2: _placed(second, 0)}
  new = make_new_rows(tiny.SIZES, rows, run_seed=1)
  np.testing.assert_array_equal(np.flatnonzero(new.start), [2, 6])
  assert (new.entry[6], new.max_tokens[6], new.prefix_length[6], new.forced[6]) == (1, 12, 9, -1)
  assert tuple(column[6] for column in new.sampling) == (0.5, 3, 0.75, 0.0)
  assert tuple(column[2] for column in new.sampling) == (1.0, 0, 1.0, 0.25)
  np.testing.assert_array_equal(new.stop_ids[6], [9, 8] + [-1] * 6)
  np.testing.assert_array_equal(new.key[6], rng.sample_key_data(1, 4, 2))
  np.testing.assert_array_equal(new.key[2], rng.sample_key_data(11, 5, 0))
  with pytest.raises(ValueError, match='slot 1 is not stored'):
    make_new_rows(tiny.SIZES, {1: Row(first, 0)}, run_seed=1)


def test_a_row_that_goes_on_counts_its_tokens(tiny):
  sizes = dataclasses.replace(tiny.SIZES, logit_controls=True)
  wish = tiny.request(4, 2, min_tokens=7, logit_bias=((3, 1.5),), presence_penalty=0.5)
  floats = np.zeros(5, np.float32)
  sampled = Sampled(np.arange(40, 45, dtype=np.int32), floats, floats, np.zeros(5, np.int32))
  new = make_new_rows(sizes, {0: _placed(wish, 0, parts=[sampled], recomputed=2)}, run_seed=0)
  assert (new.prefix_length[0], new.prompt_length[0], new.max_tokens[0]) == (11, 9, 10)
  np.testing.assert_array_equal(new.prefix[0, :11], [*wish.prompt_tokens, 40, 41])
  assert new.forced[0] == 42  # the first token after the prefix is known
  assert new.controls is not None
  assert (new.controls.min_tokens[0], new.controls.presence[0]) == (5, 0.5)
  np.testing.assert_array_equal(new.controls.bias_ids[0, :2], [3, -1])


@pytest.mark.parametrize(
  'changes, match',
  [
    ({'min_tokens': 13}, 'max_tokens=12., got 13'),
    ({'repetition_penalty': 0.0}, 'repetition_penalty must be finite and > 0'),
    ({'presence_penalty': 2.5}, r'presence_penalty must be in \[-2, 2\]'),
    ({'frequency_penalty': float('nan')}, 'frequency_penalty'),
    ({'logit_bias': ((97, 1.0),)}, r'tokens in \[0, 97\) .* got 97'),
    ({'logit_bias': tuple((i, 1.0) for i in range(17))}, '17 tokens in logit_bias, but at most 16'),
    ({'top_log_probs': 1}, r'top_log_probs must be in \[0, 0\], got 1. Raise'),
  ],
)
def test_bad_controls_are_refused(tiny, changes, match):
  sizes = dataclasses.replace(tiny.SIZES, logit_controls=True)
  with pytest.raises(ValueError, match=match):
    check_request(tiny.request(0, **changes), tiny.MODEL, sizes)


def test_an_engine_without_controls_refuses_them(tiny):
  plain = tiny.request(0)
  assert not changes_logits(plain.sampling)
  for changes in ({'min_tokens': 1}, {'logit_bias': ((1, 1.0),)}, {'presence_penalty': 0.1}):
    request = tiny.request(0, **changes)
    assert changes_logits(request.sampling)
    with pytest.raises(ValueError, match='Set EngineConfig.logit_controls'):
      check_request(request, tiny.MODEL, tiny.SIZES)


def test_pages_of_long_samples_are_larger():
  """A list of pages must fit the scalar memory of a TPU; short samples keep small pages."""
  assert EngineConfig(slots=64, max_new_tokens=64).suffix_page_size == 16
  assert EngineConfig(slots=32, max_new_tokens=7168).suffix_page_size == 32
  long = EngineConfig(slots=32, max_new_tokens=31744)
  assert long.suffix_page_size == 128 and 32 * long.pages_per_sample <= 8192
  assert EngineConfig(slots=32, max_new_tokens=31744, suffix_page_size=16).suffix_page_size == 16
