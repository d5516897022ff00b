"""The scheduler end to end on a tiny model: parity with the plain decoder, determinism, refills, stops, swaps."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.errors import FleetError, PromptTooLongError
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.types import FinishReason


def _greedy(tiny, prompt, count):
  tokens = list(prompt)
  for _ in range(count):
    tokens.append(int(tiny.full_logits(np.array(tokens))[-1].argmax()))
  return tokens[len(prompt) :]


def test_greedy_equals_argmax_of_the_whole_forward_pass(tiny):
  scheduler = tiny.scheduler()
  for sample in scheduler.generate_all([tiny.request(g, temperature=0.0) for g in range(4)]):
    np.testing.assert_array_equal(sample.tokens, _greedy(tiny, sample.request.prompt_tokens, 12))
    np.testing.assert_array_equal(sample.log_probs_t, 0)  # greedy is certain
    assert sample.finish_reason == FinishReason.LENGTH


def test_log_probs_equal_the_plain_decoder(tiny):
  requests = [tiny.request(g, i) for g in range(5) for i in range(3)]
  for sample in tiny.scheduler().generate_all(requests):
    assert np.abs(sample.raw_log_probs_t - tiny.sampled_log_probs(sample)).max() < 1e-4
    # At temperature 1 without filters the sampled distribution is the model's own.
    np.testing.assert_allclose(sample.log_probs_t, sample.raw_log_probs_t, atol=1e-6)


def test_samples_do_not_depend_on_order_slots_or_neighbours(tiny):
  requests = [tiny.request(g, i, temperature=0.5 + 0.25 * i) for g in range(6) for i in range(4)]
  first = tiny.scheduler().generate_all(requests)
  order = np.random.default_rng(1).permutation(len(requests))
  second = tiny.scheduler().generate_all([requests[i] for i in order])
  alone = tiny.scheduler().generate_all([requests[5]])[0]
  for again, i in [(alone, 5), *((second[k], i) for k, i in enumerate(order))]:
    for name in ('tokens', 'log_probs_t', 'raw_log_probs_t', 'version_t'):
      np.testing.assert_array_equal(getattr(again, name), getattr(first[i], name))


def test_more_requests_than_slots_are_refilled_and_every_prompt_is_prefilled_once(tiny):
  requests = [
    tiny.request(g, i, max_tokens=1 + (5 * i + g) % 12) for g in range(6) for i in range(6)
  ]
  scheduler = tiny.scheduler()
  done = scheduler.generate_all(requests)
  assert [sample.request for sample in done] == requests
  assert [len(sample.tokens) for sample in done] == [r.sampling.max_tokens for r in requests]
  assert scheduler.stats.prefill_tokens == sum(len(tiny.request(g).prompt_tokens) for g in range(6))
  assert scheduler.stats.sampled_tokens == sum(r.sampling.max_tokens for r in requests)
  assert (scheduler.num_running, scheduler.num_waiting, scheduler.pages_in_use) == (0, 0, (0, 0))
  assert not scheduler.has_work


def test_prompts_wait_for_pages(tiny):
  sizes = dataclasses.replace(tiny.SIZES, prefix_pages=3)
  engine = Engine(tiny.MODEL, sizes)
  requests = [tiny.request(g, i, tokens=tiny.prompt(g, 20)) for g in range(3) for i in range(2)]
  scheduler = tiny.scheduler(of=lambda: engine)
  done = scheduler.generate_all(requests)
  want = tiny.scheduler().generate_all(requests)
  for sample, other in zip(done, want, strict=True):
    np.testing.assert_array_equal(sample.tokens, other.tokens)


def test_seed_sample_index_and_group_choose_the_sample(tiny):
  def tokens(run_seed=0, **changes):
    request = tiny.request(3, 1, tokens=tiny.prompt(9, 8), **changes)
    return tiny.scheduler(run_seed=run_seed).generate_all([request])[0].tokens.tolist()

  base = tokens()
  assert base == tokens()
  assert base != tokens(run_seed=1)
  assert base == tokens(run_seed=5, seed=0)  # a request's own seed goes before the run's
  prompt = tiny.prompt(9, 8)
  requests = [tiny.request(g, i, tokens=prompt) for g in (3, 4) for i in (0, 1)]
  texts = {tuple(s.tokens) for s in tiny.scheduler().generate_all(requests)}
  assert len(texts) == 4


def test_stop_token_ends_a_sample_and_belongs_to_it(tiny):
  prompt = tiny.prompt(1, 7)
  greedy = _greedy(tiny, prompt, 12)
  stop = greedy[4]
  first = greedy.index(stop)
  requests = [
    tiny.request(1, 0, tokens=prompt, temperature=0.0, stop_token_ids=(stop,)),
    tiny.request(1, 1, tokens=prompt, temperature=0.0, stop_token_ids=(96, greedy[0])),
    tiny.request(1, 2, tokens=prompt, temperature=0.0, max_tokens=1),
    tiny.request(1, 3, tokens=prompt, temperature=0.0),
  ]
  done = tiny.scheduler().generate_all(requests)
  assert [s.tokens.tolist() for s in done] == [
    greedy[: first + 1],
    greedy[:1],
    greedy[:1],
    greedy,
  ]
  assert [s.finish_reason for s in done] == ['stop', 'stop', 'length', 'length']


def test_stop_string_ends_at_the_completing_token(tiny):
  prompt = tiny.prompt(2, 7)
  greedy = _greedy(tiny, prompt, 12)

  def decode(ids):
    return ''.join(f'<{i}>' for i in ids)

  stop = f'{greedy[7]}><{greedy[8]}>'
  requests = [
    tiny.request(2, 0, tokens=prompt, temperature=0.0, stop_strings=('never', stop)),
    tiny.request(2, 1, tokens=prompt, temperature=0.0),
  ]
  scheduler = tiny.scheduler(decode_text=decode)
  cut, whole = scheduler.generate_all(requests)
  end = next(n for n in range(1, 13) if stop in decode(greedy[:n]))
  assert cut.tokens.tolist() == greedy[:end]
  assert cut.finish_reason == FinishReason.STOP_STRING
  assert len(cut.log_probs_t) == len(cut.raw_log_probs_t) == len(cut.version_t) == end
  assert whole.tokens.tolist() == greedy
  with pytest.raises(ValueError, match='decode_text'):
    tiny.scheduler().submit(requests[0])


def test_swap_stamps_versions_and_never_reuses_an_old_prefix(tiny):
  scheduler = tiny.scheduler(version=4)
  prompt = tiny.prompt(3, 9)
  scheduler.submit(tiny.request(0, 0, tokens=prompt))
  assert scheduler.step() == []  # first token and one chunk
  scheduler.swap_params(tiny.params(1), 5)
  late = tiny.request(1, 0, tokens=prompt)
  done = scheduler.generate_all([late])[0]
  running = scheduler.step()[0] if scheduler.has_work else None
  np.testing.assert_array_equal(running.version_t, [4] * 7 + [5] * 5)
  np.testing.assert_array_equal(done.version_t, [5] * 12)
  fresh = tiny.scheduler()
  fresh.swap_params(tiny.params(1), 5)
  cold = fresh.generate_all([late])[0]
  np.testing.assert_array_equal(done.tokens, cold.tokens)
  np.testing.assert_array_equal(done.raw_log_probs_t, cold.raw_log_probs_t)
  want = tiny.sampled_log_probs(done, tiny.params(1))
  assert np.abs(done.raw_log_probs_t - want).max() < 1e-4
  with pytest.raises(ValueError, match='got 3 while 5'):
    scheduler.swap_params(tiny.params(), 3)


def test_cancel_returns_what_there_is(tiny):
  scheduler = tiny.scheduler()
  for index in range(10):
    scheduler.submit(tiny.request(0, index))
  scheduler.submit(tiny.request(1, 0))
  scheduler.step()
  aborted = scheduler.cancel(0)
  assert {s.finish_reason for s in aborted} == {FinishReason.ABORT}
  assert sorted(len(s.tokens) for s in aborted) == [0, 0] + [7] * 8
  (other,) = scheduler.generate_all([tiny.request(2, 0)])
  assert len(other.tokens) == 12
  assert [s.request.group_id for s in scheduler.step()] == [1]
  assert scheduler.pages_in_use == (0, 0)


def test_bad_requests_are_refused(tiny):
  scheduler = tiny.scheduler()

  def refused(error, match, **changes):
    with pytest.raises(error, match=match):
      scheduler.submit(tiny.request(0, 0, **changes))

  long = tiny.prompt(0, 33)
  refused(PromptTooLongError, '33 tokens, but at most 32.*max_prompt_tokens', tokens=long)
  refused(ValueError, 'P >= 1', tokens=long[:0])
  refused(ValueError, r'\[0, 97\)', tokens=long[:3] + 97)
  refused(ValueError, 'max_tokens', max_tokens=25)
  refused(ValueError, 'temperature', temperature=float('nan'))
  refused(ValueError, 'top_p', top_p=0.0)
  refused(ValueError, 'top_k', top_k=-1)
  refused(ValueError, 'min_p', min_p=1.5)
  refused(ValueError, 'stop_token_ids', stop_token_ids=tuple(range(9)))
  refused(ValueError, 'stop_strings', stop_strings=('',))
  scheduler.submit(tiny.request(0, 0))
  refused(ValueError, 'in flight already')
  assert len(scheduler.step()) == 0


def test_step_without_weights_is_refused(tiny):
  scheduler = Scheduler(tiny.engine())
  assert scheduler.step() == []
  scheduler.submit(tiny.request())
  with pytest.raises(FleetError, match='swap_params'):
    scheduler.step()
