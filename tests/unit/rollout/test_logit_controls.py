"""Controls on logits against plain numpy, alone and in the engine, whatever a row went through."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.logit_controls import (
  LogitControls,
  TokenCounts,
  adjust,
  are_on,
  count_token,
  no_controls,
  no_counts,
  start_counts,
)
from rlax_stack.rollout.sampler import raw_log_prob, top_log_probs
from rlax_stack.types import FinishReason

_CONTROLS = {
  'repetition_penalty': 1.3,
  'presence_penalty': 0.4,
  'frequency_penalty': 0.25,
  'logit_bias': ((5, 2.0), (6, -3.0)),
  'min_tokens': 4,
  'stop_token_ids': (7, 8, 9),
}


def _expected(logits, prompt, sampled, wish):
  """Logits [V] after the controls, one by one."""
  logits = logits.astype(np.float64).copy()
  for token, bias in wish.logit_bias:
    logits[token] += bias
  if len(sampled) < wish.min_tokens:
    logits[list(wish.stop_token_ids)] = -np.inf
  for token in {*prompt, *sampled}:
    logits[token] *= 1 / wish.repetition_penalty if logits[token] > 0 else wish.repetition_penalty
  for token in set(sampled):
    logits[token] -= wish.frequency_penalty * list(sampled).count(token) + wish.presence_penalty
  return logits


def test_adjust_equals_numpy():
  random = np.random.default_rng(0)
  logits = random.normal(size=(20, 2)).astype(np.float32)
  controls = LogitControls(
    min_tokens=jnp.asarray([3, 0]),
    repetition=jnp.asarray([1.5, 1.0], jnp.float32),
    presence=jnp.asarray([0.5, 0.0], jnp.float32),
    frequency=jnp.asarray([0.25, 1.0], jnp.float32),
    bias_ids=jnp.asarray([[4, -1], [2, 3]]),
    bias=jnp.asarray([[1.0, 9.0], [-1.0, 0.5]], jnp.float32),
  )
  tokens = jnp.asarray([[1, 2, 3, 3], [0, 0, 5, 0]], jnp.int32)
  counts = start_counts(
    no_counts(20, 2), tokens, jnp.asarray([4, 3]), jnp.asarray([2, 2]), jnp.asarray([True, True])
  )
  counts = count_token(counts, jnp.asarray([9, 5]), jnp.asarray([True, False]))
  stops = jnp.asarray([[6, -1], [6, 7]], jnp.int32)
  got = adjust(jnp.asarray(logits), controls, counts, count=jnp.asarray([2, 2]), stop_ids=stops)
  want = logits.astype(np.float64)
  want[4, 0] += 1
  want[[2, 3], 1] += [-1, 0.5]
  want[6, 0] = -np.inf
  for token, times in ((1, 0), (2, 0), (3, 2), (9, 1)):
    want[token, 0] = want[token, 0] / 1.5 if want[token, 0] > 0 else want[token, 0] * 1.5
    want[token, 0] -= 0.25 * times + 0.5 * (times > 0)
  want[5, 1] -= 1.0
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_no_controls_change_nothing():
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(9, 3)), jnp.float32)
  stops = jnp.full((3, 2), -1, jnp.int32)
  counts = TokenCounts(jnp.ones((9, 3), bool), jnp.full((9, 3), 2, jnp.int16))
  assert not are_on(no_controls(3, 4)).any()
  got = adjust(logits, no_controls(3, 4), counts, count=jnp.zeros(3, jnp.int32), stop_ids=stops)
  np.testing.assert_array_equal(got, logits)


def test_raw_and_top_log_probs_equal_numpy():
  logits = np.random.default_rng(2).normal(size=(9, 3)).astype(np.float32)
  want = logits - np.log(np.exp(logits.astype(np.float64)).sum(0))
  token = np.array([3, 0, 8], np.int32)
  got = raw_log_prob(jnp.asarray(logits), jnp.asarray(token))
  np.testing.assert_allclose(got, want[token, range(3)], atol=1e-6)
  ids, values = top_log_probs(jnp.asarray(logits), 4)
  order = np.argsort(-want, axis=0)[:4].T
  np.testing.assert_array_equal(ids, order)
  np.testing.assert_allclose(values, np.take_along_axis(want.T, order, 1), atol=1e-6)
  ids, values = top_log_probs(jnp.asarray(logits), 11)
  assert (ids[:, 9:] == -1).all() and (values[:, 9:] == -np.inf).all()


@pytest.fixture(scope='module')
def controlled(tiny):
  sizes = dataclasses.replace(
    tiny.SIZES, logit_controls=True, max_top_log_probs=3, suffix_pages=8, page_size=8
  )
  return Engine(tiny.MODEL, sizes)


def test_samples_follow_the_controlled_distribution(tiny, controlled):
  """Greedy tokens are the argmax of what numpy makes of the model's logits; rows are set back meanwhile."""
  prompt = tiny.prompt(3, 9)
  requests = [tiny.request(3, 0, tokens=prompt, temperature=0.0, max_tokens=20, **_CONTROLS)]
  requests += [tiny.request(g, 1, max_tokens=20) for g in range(4, 12)]
  scheduler = tiny.scheduler(of=lambda: controlled)
  sample = scheduler.generate_all(requests)[0]
  assert scheduler.stats.retracted_rows > 0
  tokens = sample.tokens
  assert len(tokens) >= 4
  whole = np.concatenate([prompt, tokens])
  logits = tiny.full_logits(whole)[len(prompt) - 1 : -1]
  for i, token in enumerate(tokens):
    want = _expected(logits[i], prompt, tokens[:i].tolist(), requests[0].sampling)
    assert token == want.argmax()
  # Raw log-probs are of the model itself.
  raw = tiny.log_softmax(logits)[np.arange(len(tokens)), tokens]
  np.testing.assert_allclose(sample.raw_log_probs_t, raw, atol=1e-4)


def test_log_probs_are_those_of_the_controlled_distribution(tiny, controlled):
  request = tiny.request(5, 0, temperature=0.7, top_log_probs=2, **_CONTROLS)
  sample = tiny.scheduler(of=lambda: controlled).generate_all([request])[0]
  prompt = request.prompt_tokens
  logits = tiny.full_logits(np.concatenate([prompt, sample.tokens]))[len(prompt) - 1 : -1]
  for i, token in enumerate(sample.tokens):
    want = _expected(logits[i], prompt, sample.tokens[:i].tolist(), request.sampling) / 0.7
    assert abs(tiny.log_softmax(want)[token] - sample.log_probs_t[i]) < 1e-4
  assert sample.top_ids_t is not None and sample.top_log_probs_t is not None
  order = np.argsort(-logits, axis=1)[:, :2]
  np.testing.assert_array_equal(sample.top_ids_t, order)
  want = np.take_along_axis(tiny.log_softmax(logits), order, 1)
  np.testing.assert_allclose(sample.top_log_probs_t, want, atol=1e-4)


def test_counts_survive_a_move_under_new_weights(tiny, controlled):
  """Tokens that join the prefix are still tokens of the sample to the penalties."""
  request = tiny.request(6, 0, temperature=0.0, **{**_CONTROLS, 'min_tokens': 12})
  source = tiny.scheduler(of=lambda: controlled)
  source.submit(request)
  source.step()
  target = tiny.scheduler(of=lambda: controlled, version=2)
  partial = source.export_row(6, 0)
  count = len(partial.tokens)
  target.import_row(partial)
  (sample,) = [s for _ in range(3) for s in target.step()]
  assert (len(sample.tokens), sample.finish_reason) == (12, FinishReason.LENGTH)
  prompt, tokens = request.prompt_tokens, sample.tokens
  logits = tiny.full_logits(np.concatenate([prompt, tokens]))[len(prompt) - 1 : -1]
  for i in range(count, 12):
    want = _expected(logits[i], prompt, tokens[:i].tolist(), request.sampling)
    assert tokens[i] == want.argmax()


def test_a_stop_string_waits_for_min_tokens(tiny, controlled):
  scheduler = tiny.scheduler(of=lambda: controlled, decode_text=lambda ids: 'x' * len(ids))
  request = tiny.request(7, 0, stop_strings=('x',), min_tokens=5)
  sample = scheduler.generate_all([request])[0]
  assert (len(sample.tokens), sample.finish_reason) == (5, FinishReason.STOP_STRING)
