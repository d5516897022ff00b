"""Scores of given texts against a plain forward pass, the scheduler's own samples and the learner."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.compile_counter import CompileCounter
from rlax_stack.errors import FleetError, PromptTooLongError
from rlax_stack.learner.packing import RowShape, pack_groups
from rlax_stack.learner.scoring import ForwardSettings, target_log_probs
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.prompt_scoring import padded_length
from rlax_stack.rollout.requests import check_text
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.score_batches import score_texts
from rlax_stack.rollout.trajectory import make_trajectory
from rlax_stack.types import Group, Prompt

_CLOSE = 1e-4  # between two float32 forward passes
_LENGTHS = (1, 2, 15, 16, 17, 33, 56)


def _texts(tiny):
  return [tiny.prompt(100 + length, length) for length in _LENGTHS]


def test_log_probs_ranks_and_likeliest_tokens_equal_the_plain_decoder(tiny):
  texts = _texts(tiny)
  scores = tiny.scheduler(of=tiny.engine_with_tops, version=3).score(texts, top=5)
  assert [len(score.log_probs_t) for score in scores] == list(_LENGTHS)
  for tokens, score in zip(texts, scores, strict=True):
    np.testing.assert_array_equal(score.tokens, tokens)
    assert score.version == 3 and score.top_ids_t.shape == (len(tokens), 5)
    assert np.isnan(score.log_probs_t[0]) and np.isnan(score.top_log_probs_t[0]).all()
    assert score.rank_t[0] == 0 and (score.top_ids_t[0] == -1).all()
    want = tiny.log_softmax(tiny.full_logits(tokens))[:-1]
    chosen = want[np.arange(len(want)), tokens[1:]]
    np.testing.assert_allclose(score.log_probs_t[1:], chosen, atol=_CLOSE)
    np.testing.assert_array_equal(score.rank_t[1:], 1 + (want > chosen[:, None]).sum(1))
    likeliest = np.argsort(-want, axis=1, kind='stable')[:, :5]
    np.testing.assert_array_equal(score.top_ids_t[1:], likeliest)
    values = np.take_along_axis(want, likeliest, axis=1)
    np.testing.assert_allclose(score.top_log_probs_t[1:], values, atol=_CLOSE)


def test_greedy_tokens_are_the_likeliest_bit_for_bit(tiny):
  scheduler = tiny.scheduler(of=tiny.engine_with_tops)
  (sample,) = scheduler.generate_all([tiny.request(1, temperature=0.0)])
  prompt = sample.request.prompt_tokens
  (score,) = scheduler.score([np.concatenate([prompt, sample.tokens])], top=1)
  np.testing.assert_array_equal(score.top_ids_t[len(prompt) :, 0], sample.tokens)
  np.testing.assert_array_equal(score.rank_t[len(prompt) :], 1)
  np.testing.assert_array_equal(score.top_log_probs_t[1:][score.rank_t[1:] == 1, 0],
                                score.log_probs_t[1:][score.rank_t[1:] == 1])  # fmt: skip


def test_sampled_tokens_score_as_they_were_sampled_and_as_the_learner_scores_them(tiny):
  scheduler = tiny.scheduler()
  requests = [tiny.request(2, i, temperature=0.7, max_tokens=24) for i in range(4)]
  samples = scheduler.generate_all(requests)
  prompt = requests[0].prompt_tokens
  scores = scheduler.score([np.concatenate([prompt, sample.tokens]) for sample in samples])
  for sample, score in zip(samples, scores, strict=True):
    assert np.abs(score.log_probs_t[len(prompt) :] - sample.raw_log_probs_t).max() < _CLOSE
    assert score.top_ids_t is None and score.top_log_probs_t is None and score.rank_t is None
  group = Group(
    group_id=2,
    prompt=Prompt(prompt_id='p', messages=(), answer=''),
    prompt_tokens=prompt,
    trajectories=tuple(make_trajectory(sample, prompt_id='p') for sample in samples),
  )
  rows = pack_groups([group], [np.zeros(4)], row_shapes=[RowShape(128, 96)])
  found = target_log_probs(
    tiny.params(), tiny.MODEL, jax.tree.map(jnp.asarray, rows), ForwardSettings()
  )
  for index, score in enumerate(scores):
    own = np.asarray(found.log_prob)[rows.mask_t & (rows.trajectory_t == index)]
    np.testing.assert_allclose(score.log_probs_t[len(prompt) :], own, atol=_CLOSE)


def test_a_score_does_not_depend_on_its_companions(tiny):
  engine, texts = tiny.engine(), _texts(tiny)
  params = engine.load_params(tiny.params())
  together = score_texts(engine, params, texts, top=0, version=0)
  for tokens, want in zip(texts, together, strict=True):
    (alone,) = score_texts(engine, params, [tokens], top=0, version=0)
    np.testing.assert_allclose(alone.log_probs_t, want.log_probs_t, atol=1e-6)
  # Whatever stands in the padding.
  padded, length = np.full((4, 16), 96, np.int32), np.full(4, 15, np.int32)
  padded[:, :15] = texts[2]
  found = np.asarray(engine.score(params, padded, length).log_probs)
  np.testing.assert_allclose(found[2, 1:15], together[2].log_probs_t[1:], atol=1e-6)
  assert (found[:, 15] == 0).all()


def test_samples_in_flight_are_not_disturbed(tiny):
  request = tiny.request(5, 1, temperature=0.8)
  (want,) = tiny.scheduler().generate_all([request])
  scheduler, texts = tiny.scheduler(), _texts(tiny)
  scheduler.submit(request)
  done, before = [], scheduler.score(texts)
  while scheduler.has_work:
    done += scheduler.step()
    for score, other in zip(scheduler.score(texts), before, strict=True):
      np.testing.assert_array_equal(score.log_probs_t, other.log_probs_t)
  for name in ('tokens', 'log_probs_t', 'raw_log_probs_t', 'version_t'):
    np.testing.assert_array_equal(getattr(done[0], name), getattr(want, name))


def test_scores_are_of_the_weights_in_use(tiny):
  scheduler, tokens = tiny.scheduler(swap_mode='drain'), tiny.prompt(7, 20)
  scheduler.submit(tiny.request(5, 1))
  scheduler.step()
  scheduler.swap_params(tiny.params(1), 1)  # waits for the running sample
  scheduler.pause()
  (old,) = scheduler.score([tokens])
  scheduler.resume()
  while scheduler.has_work:
    scheduler.step()
  (new,) = scheduler.score([tokens])
  assert (old.version, new.version) == (0, 1)
  for score, weights in ((old, tiny.params()), (new, tiny.params(1))):
    want = tiny.log_softmax(tiny.full_logits(tokens, weights))[np.arange(19), tokens[1:]]
    np.testing.assert_allclose(score.log_probs_t[1:], want, atol=_CLOSE)


def test_few_programs_are_compiled(tiny):
  sizes = dataclasses.replace(tiny.SIZES, max_new_tokens=28)
  assert sizes.max_text_tokens == 60
  assert [padded_length(sizes, n) for n in (1, 16, 17, 32, 33, 60)] == [16, 16, 32, 32, 64, 64]
  odd = dataclasses.replace(tiny.SIZES, page_size=24, prefill_chunk=48)
  assert [padded_length(odd, n) for n in (24, 25, 49, 56)] == [24, 48, 72, 72]
  scheduler = tiny.scheduler(of=lambda: Engine(tiny.MODEL, sizes))
  scheduler.score(_texts(tiny))
  with CompileCounter() as counter:
    scheduler.score([tiny.prompt(length, length) for length in range(1, 61)])
    assert counter.count.names == ()


def test_texts_that_cannot_be_scored_are_refused(tiny):
  scheduler = tiny.scheduler()
  refused = [
    (PromptTooLongError, 'has 57 tokens, but at most 56.*max_prompt_tokens', tiny.prompt(0, 57), 0),
    (ValueError, r'tokens must be \[P\] with P >= 1', tiny.prompt(0, 0), 0),
    (ValueError, r'tokens must be in \[0, 97\), got 97..97', np.full(3, 97, np.int32), 0),
    (ValueError, r'top must be in \[0, 0\], got 1. Raise', tiny.prompt(0, 3), 1),
  ]
  for error, words, tokens, top in refused:
    with pytest.raises(error, match=words):
      scheduler.score([tiny.prompt(1, 4), tokens], top)
    with pytest.raises(error, match=words):
      check_text(tokens, top, tiny.MODEL, tiny.SIZES)
  with pytest.raises(FleetError, match='swap_params before score'):
    Scheduler(tiny.engine()).score([tiny.prompt(0, 3)])
