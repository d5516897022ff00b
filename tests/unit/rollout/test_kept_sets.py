"""Kept sets from the sampler to the trajectory, against sets found by sorting in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack import rng
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.sampler import RowSampling, kept_ids, sample
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.types import KEPT_OVERFLOW

_VOCABULARY = 301
# temperature, top_k, top_p, min_p
_SETTINGS = [
  (1.0, 5, 1.0, 0.0),
  (0.7, 0, 0.8, 0.0),
  (1.3, 0, 0.3, 0.0),
  (1.0, 0, 1.0, 0.1),
  (0.9, 20, 0.7, 0.02),
  (1.5, 1, 1.0, 0.0),
  (1.0, 0, 1.0, 0.0),  # no filter
  (0.0, 3, 0.5, 0.5),  # greedy
]


def _kept(logits, temperature, top_k, top_p, min_p):
  """Ids that the filters keep, likeliest first; None for the whole vocabulary. Ties are kept together."""
  if temperature == 0 or (not top_k and top_p == 1 and not min_p):
    return None
  scores = logits.astype(np.float64) / temperature
  weights = np.exp(scores - scores.max())
  order = np.argsort(-scores, kind='stable')
  keep = np.ones(len(scores), bool)
  if top_k:
    keep = scores >= scores[order[min(top_k, len(scores)) - 1]]
  if top_p < 1:
    inside = np.where(keep, weights, 0.0)[order]
    last = np.flatnonzero(np.cumsum(inside) >= top_p * inside.sum() - 1e-12)[0]
    keep &= scores >= scores[order[last]]
  if min_p:
    keep &= weights >= min_p
  keep &= np.isfinite(scores)
  return [i for i in order if keep[i]]


def _recorded(logits, setting, count):
  kept = _kept(logits, *setting)
  if kept is None:
    return [-1] * count
  if len(kept) > count:
    return [KEPT_OVERFLOW] + [-1] * (count - 1)
  return kept + [-1] * (count - len(kept))


def _sampling(settings):
  columns = (np.asarray(x) for x in zip(*settings, strict=True))
  kinds = (np.float32, np.int32, np.float32, np.float32)
  return RowSampling(*(x.astype(kind) for x, kind in zip(columns, kinds, strict=True)))


def _draw(logits, settings, count):
  rows = len(settings)
  key = np.broadcast_to(rng.sample_key_data(0, 0, 0), (rows, 2))
  uniforms = rng.token_uniforms(key, np.arange(rows, dtype=np.int32))
  return jax.device_get(
    jax.jit(sample, static_argnums=3)(logits, uniforms, _sampling(settings), count)
  )


@pytest.mark.parametrize('count', [1, 3, 400])
@pytest.mark.parametrize('seed', [0, 1])
def test_sets_equal_those_found_by_sorting(seed, count):
  random = np.random.default_rng(seed)
  logits = 2 * random.normal(size=(_VOCABULARY, len(_SETTINGS))).astype(np.float32)
  logits[7] = -np.inf  # shut out
  drawn = _draw(logits, _SETTINGS, count)
  assert drawn.kept_ids.shape == (len(_SETTINGS), count) and drawn.kept_ids.dtype == np.int32
  seen = set()
  for i, setting in enumerate(_SETTINGS):
    want = _recorded(logits[:, i], setting, count)
    np.testing.assert_array_equal(drawn.kept_ids[i], want, err_msg=str(setting))
    seen.add('none' if want[0] == -1 else 'overflow' if want[0] == KEPT_OVERFLOW else 'set')
    if want[0] >= 0:
      assert drawn.token[i] in want
  assert seen == ({'none', 'set', 'overflow'} if count < 400 else {'none', 'set'})
  bare = _draw(logits, _SETTINGS, 0)
  assert bare.kept_ids is None
  np.testing.assert_array_equal(bare.token, drawn.token)
  np.testing.assert_array_equal(bare.log_prob, drawn.log_prob)


def test_ties_at_the_threshold_are_in_the_set():
  logits = np.full((9, 3), -5.0, np.float32)
  logits[[1, 4, 6, 8]] = np.array([[1.0], [3.0], [1.0], [1.0]])
  settings = [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.05)]
  drawn = _draw(logits, settings, 4)
  for i, setting in enumerate(settings):
    assert _kept(logits[:, i], *setting) == [4, 1, 6, 8]
    assert drawn.kept_ids[i].tolist() == [4, 1, 6, 8]
  # One fewer place and the tie makes it overflow.
  assert _draw(logits, settings, 3).kept_ids.tolist() == [[KEPT_OVERFLOW, -1, -1]] * 3


def test_a_row_without_a_filter_beside_one_that_has_it():
  scaled = jnp.asarray([[0.0, 0.0], [-1.0, -1.0], [-jnp.inf, -2.0]])
  kept = jnp.asarray([[True, True], [True, False], [True, True]])
  got = kept_ids(scaled, kept, jnp.asarray([True, False]), 4)
  assert got.tolist() == [[0, 1, -1, -1], [-1] * 4]
  got = kept_ids(scaled, kept, jnp.asarray([True, True]), 4)
  assert got.tolist() == [[0, 1, -1, -1], [0, 2, -1, -1]]


@functools.cache
def _engine(tiny_sizes, model, **changes):
  return Engine(model, dataclasses.replace(tiny_sizes, **changes))


@pytest.fixture(scope='module')
def keeping(tiny):
  """Function (sizes) -> an engine that records 12 ids per token."""
  return lambda **changes: _engine(tiny.SIZES, tiny.MODEL, **{'kept_tokens': 12, **changes})


_REQUESTS = [
  {'temperature': 0.8, 'top_k': 9},
  {'temperature': 1.0, 'top_p': 0.3},
  {'temperature': 1.2, 'min_p': 0.2},
  {'temperature': 0.9, 'top_k': 12, 'top_p': 0.8, 'min_p': 0.01},
  {'temperature': 0.0, 'top_k': 3},
  {'temperature': 1.0},
  {'temperature': 1.5, 'top_p': 0.97},  # overflows
]


@pytest.fixture(scope='module')
def requests(tiny):
  return [tiny.request(g, 0, max_tokens=20, **s) for g, s in enumerate(_REQUESTS)]


@pytest.fixture(scope='module')
def samples(tiny, keeping, requests):
  return tiny.scheduler(of=keeping).generate_all(requests)


def test_samples_carry_the_sets_they_were_drawn_from(tiny, samples):
  """Of first and of later tokens, and the log-prob is within the set."""
  overflows = 0
  for sample_, setting in zip(samples, _REQUESTS, strict=True):
    full = {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0} | setting
    tokens = np.concatenate([sample_.request.prompt_tokens, sample_.tokens])
    logits = tiny.full_logits(tokens)[len(sample_.request.prompt_tokens) - 1 : -1]
    assert sample_.kept_ids_t.shape == (20, 12)
    for row, ids, token, log_prob in zip(
      logits, sample_.kept_ids_t, sample_.tokens, sample_.log_probs_t, strict=True
    ):
      want = _recorded(row, (full['temperature'], full['top_k'], full['top_p'], full['min_p']), 12)
      assert ids.tolist() == want
      overflows += want[0] == KEPT_OVERFLOW
      if want[0] >= 0:
        inside = row[[i for i in want if i >= 0]] / full['temperature']
        total = np.log(np.exp(inside - inside.max()).sum()) + inside.max()
        assert log_prob == pytest.approx(row[token] / full['temperature'] - total, abs=1e-4)
  assert overflows > 5


def test_an_engine_without_room_records_nothing_and_samples_the_same(tiny, samples, requests):
  for got, want in zip(tiny.scheduler().generate_all(requests), samples, strict=True):
    assert got.kept_ids_t is None
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.log_probs_t, want.log_probs_t)


def test_columns_that_check_drafts_record_the_same_sets(tiny, keeping, samples, requests):
  scheduler = tiny.scheduler(of=lambda: keeping(max_draft=3))
  few = list(zip(requests, samples, strict=True))[:3]
  drafted = [dataclasses.replace(r, draft_tokens=s.tokens) for r, s in few]
  for got, (_, want) in zip(scheduler.generate_all(drafted), few, strict=True):
    np.testing.assert_array_equal(got.kept_ids_t, want.kept_ids_t)
  assert scheduler.stats.accepted_tokens > 20


def test_sets_move_with_half_done_samples_and_survive_new_weights(tiny, keeping, samples, requests):
  source, target = tiny.scheduler(of=keeping), tiny.scheduler(of=keeping)
  source.submit(requests[0])
  source.step()
  partial = source.export_row(*requests[0].identity)
  assert 0 < len(partial.kept_ids_t) == len(partial.tokens) < 20
  target.import_row(partial)
  done = []
  while target.has_work:
    done += target.step()
  np.testing.assert_array_equal(done[0].kept_ids_t, samples[0].kept_ids_t)
  # Under other weights what was drawn keeps its sets: they are of the weights that drew it.
  other = Scheduler(keeping())
  other.swap_params(tiny.params(1), 1)
  other.import_row(partial)
  done = []
  while other.has_work:
    done += other.step()
  count = len(partial.tokens)
  np.testing.assert_array_equal(done[0].kept_ids_t[:count], samples[0].kept_ids_t[:count])
  assert not np.array_equal(done[0].kept_ids_t[count:], samples[0].kept_ids_t[count:])


def test_rows_set_back_keep_their_sets(tiny, keeping):
  requests = [tiny.request(g, i, top_p=0.7, max_tokens=17) for g in range(2) for i in range(4)]
  wanted = tiny.scheduler(of=keeping).generate_all(requests)
  scheduler = tiny.scheduler(of=lambda: keeping(suffix_pages=8))
  for got, want in zip(scheduler.generate_all(requests), wanted, strict=True):
    np.testing.assert_array_equal(got.kept_ids_t, want.kept_ids_t)
  assert scheduler.stats.replayed_tokens > 0


def test_a_half_done_sample_of_another_kept_tokens_is_refused(tiny, keeping, requests):
  source = tiny.scheduler(of=keeping)
  source.submit(requests[0])
  source.step()
  partial = source.export_row(*requests[0].identity)
  with pytest.raises(ValueError, match=r'kept_tokens=0, got \(7, 12\).*same kept_tokens'):
    tiny.scheduler().import_row(partial)
  bare = dataclasses.replace(partial, kept_ids_t=None)
  with pytest.raises(ValueError, match=r'kept_ids_t must be \(7, 12\) .*got None'):
    tiny.scheduler(of=keeping).import_row(bare)
