"""Attention received against sums over whole attention matrices in numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import FleetError, PromptTooLongError
from rlax_stack.models import decoder
from rlax_stack.rollout import prefill
from rlax_stack.rollout.attention_scores import attention_received
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.prefill import AttentionRule, attention_blocks, causal_attention
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.score_batches import attention_in_text, with_attention


def _brute_force(tiny, tokens, distance, window=None):
  """float64 [T]: whole matrices [L, H, T, T] of the queries and keys that the model makes."""
  positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
  _, (q, k) = decoder.hidden_states_and_aux(
    tiny.params(),
    tiny.MODEL,
    jnp.asarray(tokens)[None],
    positions,
    lambda q, k, v: (causal_attention(q, k, v, AttentionRule(window)), (q, k)),
  )
  q, k = (np.asarray(x, np.float64)[:, 0] for x in (q, k))  # [L, T, heads, Dh]
  k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
  scores = np.einsum('lthd,lshd->lhts', q, k) / np.sqrt(q.shape[-1])
  ages = np.arange(len(tokens))[:, None] - np.arange(len(tokens))[None]
  seen = (ages >= 0) & (ages < (window or len(tokens)))
  weights = np.where(seen, np.exp(scores), 0)
  weights /= weights.sum(-1, keepdims=True)
  return np.where(ages >= distance, weights, 0).sum(2).mean((0, 1))


@pytest.mark.parametrize('block', [256, 8])
@pytest.mark.parametrize('window', [None, 6])
def test_columns_of_the_softmax_are_summed(tiny, monkeypatch, window, block):
  monkeypatch.setattr(prefill, '_QUERY_BLOCK', block)
  model = dataclasses.replace(tiny.MODEL, sliding_window=window)
  engine = Engine(model, tiny.SIZES)
  params = engine.load_params(tiny.params())
  for length, distance in ((1, 1), (19, 0), (19, 1), (19, 4), (32, 4)):
    tokens = tiny.prompt(length, length)
    found = attention_in_text(engine, params, tokens, distance)
    assert found.dtype == np.float32 and found.shape == (length,)
    np.testing.assert_allclose(found, _brute_force(tiny, tokens, distance, window), atol=1e-5)
    if distance == 0:  # every token pays 1 in all
      assert found.sum() == pytest.approx(length, abs=1e-4)


def test_texts_of_a_batch_and_padding_do_not_meet(tiny):
  engine = tiny.engine()
  params = engine.load_params(tiny.params())
  tokens = np.stack([np.full(16, 96, np.int32), tiny.prompt(3, 16)])
  lengths = np.array([5, 11], np.int32)
  found = attention_received(
    tiny.MODEL, tiny.SIZES, params, jnp.asarray(tokens), jnp.asarray(lengths), jnp.int32(2)
  )
  for row, length in enumerate(lengths):
    want = _brute_force(tiny, tokens[row, :length], 2)
    np.testing.assert_allclose(found[row, :length], want, atol=1e-5)
    assert (np.asarray(found)[row, length:] == 0).all()


def test_blocks_make_up_the_whole_matrix(tiny, monkeypatch):
  monkeypatch.setattr(prefill, '_QUERY_BLOCK', 5)
  random = np.random.default_rng(0)
  q = jnp.asarray(random.normal(size=(1, 12, 4, 8)), jnp.float32)
  k = jnp.asarray(random.normal(size=(1, 12, 2, 8)), jnp.float32)
  blocks = list(attention_blocks(q, k))
  assert [(start, end) for start, end, _ in blocks] == [(0, 5), (5, 10), (10, 12)]
  for start, end, weights in blocks:
    assert weights.shape == (1, 2, 2, end - start, end)
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, atol=1e-6)


def test_the_scheduler_answers_at_once_and_with_samples_that_ask(tiny):
  scheduler, tokens = tiny.scheduler(), tiny.prompt(1, 20)
  asks = dataclasses.replace(tiny.request(2, 0), attention_distance=3)
  scheduler.submit(asks)
  for request in (tiny.request(2, 1), dataclasses.replace(asks, sample_index=2)):
    scheduler.submit(request)
  scheduler.step()
  found = scheduler.attention_received(tokens, 2)
  np.testing.assert_allclose(found, _brute_force(tiny, tokens, 2), atol=1e-5)
  (cancelled,) = scheduler.cancel_sample(2, 2)
  assert cancelled.attention_t is None
  done = {}
  while scheduler.has_work:
    done |= {sample.request.sample_index: sample for sample in scheduler.step()}
  assert done[1].attention_t is None
  prompt = asks.prompt_tokens
  want = _brute_force(tiny, np.concatenate([prompt, done[0].tokens]), 3)[len(prompt) :]
  np.testing.assert_allclose(done[0].attention_t, want, atol=1e-5)
  # Nothing else of the sample differs from one that did not ask.
  (plain,) = tiny.scheduler().generate_all([tiny.request(2, 0)])
  for name in ('tokens', 'log_probs_t', 'raw_log_probs_t', 'version_t'):
    np.testing.assert_array_equal(getattr(done[0], name), getattr(plain, name))
  assert with_attention(tiny.engine(), None, plain) is plain


def test_what_is_refused(tiny):
  scheduler = tiny.scheduler()
  with pytest.raises(ValueError, match='distance must be at least 0, got -1'):
    scheduler.attention_received(tiny.prompt(0, 3), -1)
  with pytest.raises(ValueError, match='attention_distance must be at least 0'):
    scheduler.submit(dataclasses.replace(tiny.request(), attention_distance=-1))
  with pytest.raises(PromptTooLongError, match='has 57 tokens'):
    scheduler.attention_received(tiny.prompt(0, 57))
  with pytest.raises(FleetError, match='no weights yet'):
    Scheduler(tiny.engine()).attention_received(tiny.prompt(0, 3))
