"""Prefixes in pieces: they equal the whole, are interleaved with decoding, and reuse of stored ones changes no bit."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.prefiller import Prefiller


def _sizes(tiny, **changes):
  return dataclasses.replace(
    tiny.SIZES,
    **{
      'max_prompt_tokens': 90,
      'page_size': 8,
      'prefix_pages': 48,
      'prefill_chunk': 16,
      'prefill_tokens': 32,
      **changes,
    },
  )


@pytest.fixture(scope='module')
def pieces(tiny):
  return Engine(tiny.MODEL, _sizes(tiny))


def _long(tiny, group, index=0, length=50, **sampling):
  return tiny.request(group, index, tokens=tiny.prompt(group, length), **sampling)


def test_a_prefix_in_pieces_gives_the_log_probs_of_the_whole(tiny, pieces):
  requests = [_long(tiny, g, i, 15 + 16 * g + g % 2) for g in range(4) for i in range(2)]
  for sample in tiny.scheduler(of=lambda: pieces).generate_all(requests):
    assert np.abs(sample.raw_log_probs_t - tiny.sampled_log_probs(sample)).max() < 1e-4


def test_a_window_is_kept_across_pieces(tiny):
  model = dataclasses.replace(tiny.MODEL, sliding_window=20)
  request = _long(tiny, 0, temperature=0.0)
  cut = Engine(model, _sizes(tiny))
  whole = Engine(model, _sizes(tiny, prefill_chunk=96))
  (got,), (want,) = (
    tiny.scheduler(of=lambda engine=engine: engine).generate_all([request])
    for engine in (cut, whole)
  )
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_allclose(got.raw_log_probs_t, want.raw_log_probs_t, atol=1e-5)
  assert np.abs(got.raw_log_probs_t - tiny.sampled_log_probs(got)).max() > 1e-3


def test_reuse_of_an_earlier_turn_changes_no_bit(tiny, pieces):
  """The second turn begins with all of the first one: its pieces are read, not computed."""
  scheduler = tiny.scheduler(of=lambda: pieces)
  first = scheduler.generate_all([_long(tiny, 0, length=40)])[0]
  talk = np.concatenate([tiny.prompt(0, 40), first.tokens, tiny.prompt(9, 6)])
  second = tiny.request(1, 0, tokens=talk)
  before = scheduler.stats.prefill_tokens
  warm = scheduler.generate_all([second])[0]
  assert scheduler.stats.prefill_tokens - before == len(talk) - 32  # two pieces of 16 were there
  cold = tiny.scheduler(of=lambda: pieces).generate_all([second])[0]
  for name in ('tokens', 'log_probs_t', 'raw_log_probs_t'):
    np.testing.assert_array_equal(getattr(warm, name), getattr(cold, name))
  scheduler.swap_params(tiny.params(1), 1)
  before = scheduler.stats.prefill_tokens
  swapped = scheduler.generate_all([second])[0]
  assert scheduler.stats.prefill_tokens - before == len(talk)  # KV of older weights is never met
  want = tiny.sampled_log_probs(swapped, tiny.params(1))
  assert np.abs(swapped.raw_log_probs_t - want).max() < 1e-4


def test_a_long_prompt_does_not_hold_up_the_rows_that_decode(tiny):
  engine = Engine(tiny.MODEL, _sizes(tiny, prefill_budget=16, chunk_steps=2))
  scheduler = tiny.scheduler(of=lambda: engine)
  scheduler.submit(tiny.request(0, 0, max_tokens=24))
  scheduler.step()
  late = _long(tiny, 1, length=80)
  scheduler.submit(late)
  lengths = []
  while (1, 0) not in scheduler.progress() or not len(scheduler.progress()[1, 0].tokens):
    scheduler.step()
    lengths.append(len(scheduler.progress()[0, 0].tokens))
  assert len(lengths) == 5  # five pieces, one a step
  np.testing.assert_array_equal(np.diff(lengths), 2)
  (done,) = [s for _ in range(40) for s in scheduler.step() if s.request == late]
  alone = tiny.scheduler(of=lambda: engine).generate_all([late])[0]
  np.testing.assert_array_equal(done.tokens, alone.tokens)


def test_set_back_under_new_weights_a_long_sample_is_prefilled_in_pieces(tiny, pieces):
  scheduler = tiny.scheduler(of=lambda: pieces, swap_mode='retract')
  scheduler.submit(_long(tiny, 0, length=85))
  scheduler.step()
  scheduler.swap_params(tiny.params(1), 1)
  (done,) = [s for _ in range(4) for s in scheduler.step()]
  np.testing.assert_array_equal(done.version_t, [0] * 7 + [1] * 5)
  want = tiny.sampled_log_probs(done, tiny.params(1))
  assert np.abs(done.raw_log_probs_t - want)[7:].max() < 1e-4


def test_a_piece_computed_after_its_context_equals_the_whole(tiny, pieces):
  """engine.prefill_more beside rows of other contexts: the logits of the whole prefix, the same alone, bit for bit."""
  params, tokens = pieces.load_params(tiny.params()), tiny.prompt(0, 40)
  first = pieces.prefill(
    params=params,
    padded_tokens=np.stack([tokens[:16], tokens[16:32]]),
    true_length=np.array([16, 16], np.int32),
  )
  nowhere = np.full(2, pieces.engine_config.slots, np.int32)
  state = pieces.insert(
    first, pieces.init_decode_state(), np.array([[5, 2], [48, 48]], np.int32), nowhere
  )
  width = pieces.engine_config.pages_per_prefix

  def more(rows):
    """Pieces (tokens, pages, context) padded to two rows."""
    padded, before = np.zeros((2, 16), np.int32), np.zeros((2, width), np.int32)
    lengths, context = np.ones(2, np.int32), np.zeros(2, np.int32)
    for i, (own, pages, tokens_before) in enumerate(rows):
      padded[i, : len(own)], lengths[i] = own, len(own)
      before[i, : len(pages)], context[i] = pages, tokens_before
    return pieces.prefill_more(params, state, padded, lengths, before, context)

  alone = more([(tokens[16:27], (5, 2), 16)])
  beside = more([(tokens[16:27], (5, 2), 16), (tokens[:3], (), 0)])
  np.testing.assert_allclose(alone.logits[0], tiny.full_logits(tokens[:27])[-1], atol=1e-4)
  np.testing.assert_array_equal(alone.logits[0], beside.logits[0])
  np.testing.assert_allclose(beside.logits[1], tiny.full_logits(tokens[:3])[-1], atol=1e-4)


def test_prefiller_counts_what_it_computes(tiny, pieces):
  prefiller = Prefiller(pieces)
  params = pieces.load_params(tiny.params())
  state = prefiller.warm_up(params, pieces.init_decode_state(), follows=True)
  assert (prefiller.num_pending, prefiller.tokens) == (0, 0)
  assert prefiller.padded_tokens > 0
  prefiller.forget()
  assert jnp.isfinite(state.prefix_logits).all()
