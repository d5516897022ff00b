"""What RL does to running samples: short pages, swaps, pauses, moves between schedulers. Tokens never change."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.errors import FleetError
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.types import FinishReason

_FIELDS = ('tokens', 'log_probs_t', 'raw_log_probs_t', 'version_t')


def _check_equal(got, want):
  for name in _FIELDS:
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  assert got.finish_reason == want.finish_reason


@pytest.fixture(scope='module')
def wanted(tiny):
  """Requests of mixed sampling and length, and their samples by an engine where everything fits."""
  requests = [
    tiny.request(g, i, temperature=0.5 + 0.5 * (i % 2), top_k=5 * (i % 3), max_tokens=5 + 6 * i)
    for g in range(4)
    for i in range(4)
  ]
  return requests, tiny.scheduler().generate_all(requests)


@pytest.fixture(scope='module')
def short(tiny):
  """An engine with pages for a third of what its rows may need."""
  return Engine(tiny.MODEL, dataclasses.replace(tiny.SIZES, suffix_pages=8))


def test_rows_set_back_for_want_of_pages_go_on_to_the_same_bits(tiny, wanted, short):
  requests, samples = wanted
  scheduler = tiny.scheduler(of=lambda: short)
  for got, want in zip(scheduler.generate_all(requests), samples, strict=True):
    _check_equal(got, want)
  assert scheduler.stats.retracted_rows > 0 and scheduler.stats.replayed_tokens > 0
  assert scheduler.stats.sampled_tokens == sum(len(sample.tokens) for sample in samples)
  assert scheduler.pages_in_use == (0, 0)


def test_samples_move_between_schedulers_and_go_on_to_the_same_bits(tiny, wanted):
  requests, samples = wanted
  source, target = tiny.scheduler(run_seed=3), tiny.scheduler(run_seed=4)
  fixed = [dataclasses.replace(r.sampling, seed=0) for r in requests]
  for request, sampling in zip(requests, fixed, strict=True):
    source.submit(dataclasses.replace(request, sampling=sampling))
  done = source.step()
  moved = [r for r in requests if r.identity in source.progress()][::2]
  for request in moved:
    partial = source.export_row(*request.identity)
    assert request.identity not in source.progress()
    target.import_row(partial)
  assert any(len(partial.tokens) for partial in target.progress().values())
  while source.has_work:
    done += source.step()
  assert source.pages_in_use == (0, 0)
  while target.has_work:
    done += target.step()
  assert target.stats.replayed_tokens > 0
  found = {sample.request.identity: sample for sample in done}
  for request, want in zip(requests, samples, strict=True):
    _check_equal(found[request.identity], want)


def test_a_moved_sample_under_other_weights_is_computed_anew(tiny):
  source, target = tiny.scheduler(), Scheduler(tiny.engine())
  target.swap_params(tiny.params(1), 1)
  source.submit(tiny.request(0, 0))
  source.step()
  partial = source.export_row(0, 0)
  count = len(partial.tokens)
  assert (count, partial.kv_version, partial.request.sampling.seed) == (7, 0, 0)
  target.import_row(partial)
  sample = target.generate_all([])
  while not sample:
    sample = target.step()
  (sample,) = sample
  np.testing.assert_array_equal(sample.version_t, [0] * 7 + [1] * 5)
  want = tiny.sampled_log_probs(sample, tiny.params(1))
  assert np.abs(sample.raw_log_probs_t - want)[7:].max() < 1e-4
  assert target.stats.replayed_tokens == 0


@pytest.mark.parametrize('mode', ['in_place', 'retract', 'drain'])
def test_swaps_between_chunks(tiny, mode):
  scheduler = tiny.scheduler(swap_mode=mode)
  scheduler.submit(tiny.request(0, 0))
  scheduler.step()
  scheduler.swap_params(tiny.params(1), 1)
  late = tiny.request(1, 0)
  scheduler.submit(late)
  if mode == 'drain':
    assert (scheduler.version, scheduler.free_capacity) == (0, 0)
    with pytest.raises(ValueError, match='got 0 while 1'):
      scheduler.swap_params(tiny.params(), 0)
  done = {}
  while scheduler.has_work:
    done |= {sample.request.group_id: sample for sample in scheduler.step()}
  assert scheduler.version == 1
  changed = done[0].version_t.tolist()
  assert changed == ([0] * 12 if mode == 'drain' else [0] * 7 + [1] * 5)
  # Who starts after the swap never meets the KV of older weights: a cold engine says the same.
  cold = Scheduler(tiny.engine())
  cold.swap_params(tiny.params(1), 1)
  _check_equal(done[1], cold.generate_all([late])[0])
  gaps = np.abs(done[0].raw_log_probs_t - tiny.sampled_log_probs(done[0], tiny.params(1)))[7:]
  if mode == 'retract':  # all KV is of the new weights
    assert gaps.max() < 1e-4 and scheduler.stats.retracted_rows == 1
  if mode == 'in_place':  # the KV of the first tokens is of the old ones
    assert gaps.max() > 1e-3
  assert scheduler.pages_in_use == (0, 0)


def test_rows_kept_in_place_are_computed_anew_once_they_are_set_back(tiny):
  scheduler = tiny.scheduler()
  scheduler.submit(tiny.request(0, 0))
  scheduler.step()
  scheduler.swap_params(tiny.params(1), 1)
  partial = scheduler.export_row(0, 0)
  assert partial.kv_version == -1
  scheduler.import_row(partial)
  (sample,) = [s for _ in range(3) for s in scheduler.step()]
  gaps = np.abs(sample.raw_log_probs_t - tiny.sampled_log_probs(sample, tiny.params(1)))
  assert gaps[7:].max() < 1e-4


def test_pause_stops_steps_and_nothing_else(tiny):
  scheduler = tiny.scheduler()
  scheduler.submit(tiny.request(0, 0))
  scheduler.step()
  before = scheduler.progress()[0, 0].tokens
  scheduler.pause()
  assert scheduler.step() == []
  np.testing.assert_array_equal(scheduler.progress()[0, 0].tokens, before)
  with pytest.raises(FleetError, match='Call resume'):
    scheduler.generate_all([tiny.request(1, 0)])
  (aborted,) = scheduler.cancel_sample(0, 0)
  assert aborted.finish_reason == FinishReason.ABORT
  np.testing.assert_array_equal(aborted.tokens, before)
  assert scheduler.cancel_sample(0, 0) == []
  scheduler.resume()
  assert len(scheduler.generate_all([tiny.request(0, 0)])[0].tokens) == 12
  with pytest.raises(ValueError, match='in_place, retract, drain'):
    tiny.scheduler(swap_mode='abort')


def test_half_done_samples_that_cannot_go_on_are_refused(tiny):
  scheduler = tiny.scheduler()
  scheduler.submit(tiny.request(0, 0))
  scheduler.step()
  partial = scheduler.export_row(0, 0)
  with pytest.raises(KeyError, match='sample 0 of group 0 is not in flight'):
    scheduler.export_row(0, 0)

  def refused(match, **changes):
    with pytest.raises(ValueError, match=match):
      scheduler.import_row(dataclasses.replace(partial, **changes))

  refused(r'\[0, 97\)', tokens=partial.tokens + 97)
  refused('recomputed must be in', recomputed=8)
  refused('7 tokens, but log-probs', version_t=partial.version_t[:3])
  few = dataclasses.replace(partial.request.sampling, max_tokens=7)
  refused('nothing is left', request=dataclasses.replace(partial.request, sampling=few))
  scheduler.import_row(partial)
  refused('in flight already')


def test_two_thousand_random_events_lose_nothing(tiny, short):
  """Inserts, steps, swaps, aborts, pauses and moves at random times: every sample ends once, every page comes back."""
  random = np.random.default_rng(7)
  two = [tiny.scheduler(of=lambda: short), tiny.scheduler(of=lambda: short, swap_mode='retract')]
  asked, ended, version = {}, {}, 0

  def note(samples):
    for sample in samples:
      assert sample.request.identity not in ended
      ended[sample.request.identity] = sample

  for event in range(2000):
    here, other = (two[i] for i in random.permutation(2))
    kind = random.choice(8, p=[0.3, 0.45, 0.03, 0.05, 0.1, 0.03, 0.02, 0.02])
    flying = list(here.progress())
    if kind == 0 and here.num_waiting < 6:
      wish = {'max_tokens': int(random.integers(1, 25)), 'temperature': float(random.random())}
      request = tiny.request(event, 0, tokens=tiny.prompt(event % 7, 3 + event % 29), **wish)
      asked[request.identity] = request
      here.submit(request)
    elif kind == 1:
      note(here.step())
    elif kind == 2:
      version += 1
      here.swap_params(tiny.params(version % 2), max(version, here.version))
    elif kind == 3 and flying:
      note(here.cancel_sample(*flying[random.integers(len(flying))]))
    elif kind == 4 and flying:
      other.import_row(here.export_row(*flying[random.integers(len(flying))]))
    elif kind == 5 and flying:
      note(here.cancel(flying[0][0]))
    elif kind == 6:
      here.pause()
    elif kind == 7:
      here.resume()
  for scheduler in two:
    scheduler.resume()
    while scheduler.has_work:
      note(scheduler.step())
    assert scheduler.pages_in_use == (0, 0) and scheduler.num_waiting == 0
  assert ended.keys() == asked.keys() and len(ended) > 200
  assert sum(scheduler.stats.retracted_rows for scheduler in two) > 20
  for identity, sample in ended.items():
    count = len(sample.tokens)
    assert count == len(sample.log_probs_t) == len(sample.version_t)
    assert np.isfinite(sample.log_probs_t).all() and (sample.log_probs_t <= 1e-5).all()
    if sample.finish_reason == FinishReason.LENGTH:
      assert count == asked[identity].sampling.max_tokens
    else:
      assert sample.finish_reason == FinishReason.ABORT
