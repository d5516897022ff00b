"""The way to the engine without a server before it: identity of samples, admission, weights, the end."""

import asyncio
import contextlib
import dataclasses
import time

import numpy as np
import pytest

from rlax_stack import assembly
from rlax_stack.errors import FleetError, PromptTooLongError
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.serving.bridge import EngineBridge, OverloadedError, fresh_seed
from rlax_stack.serving.metrics import ServingMetrics
from rlax_stack.serving.ticket import DeadlineError, Ticket, Update
from rlax_stack.types import FinishReason, SamplingParams

PROMPT = np.asarray([3, 4, 5], np.int32)
SAMPLING = SamplingParams(max_tokens=40, seed=7)


@pytest.fixture(scope='module')
def parts(serve_config):
  config = serve_config()
  model, sizes = assembly.load_checked_model(config, {}), assembly.engine_sizes(config)
  return model, sizes, Engine(model.config, sizes)


@pytest.fixture
def scheduler(parts):
  model, _, engine = parts
  made = Scheduler(engine)
  made.swap_params(model.params, 0)
  return made


@contextlib.contextmanager
def bridged(parts, scheduler):
  model, sizes, _ = parts
  metrics = ServingMetrics(slots=sizes.slots, view=lambda: bridge.view)
  bridge = EngineBridge(scheduler, model=model.config, sizes=sizes, max_waiting=2, observer=metrics)
  bridge.start()
  try:
    yield bridge, metrics
  finally:
    bridge.stop(10)


def test_a_sample_is_that_of_its_seed_and_place(parts, scheduler):
  requests = [
    GenerationRequest(group_id=g, sample_index=i, prompt_tokens=PROMPT, sampling=SAMPLING)
    for g in range(2)
    for i in range(2)
  ]
  want = scheduler.generate_all(requests)

  async def ask(bridge):
    for _ in range(2):  # the identities differ each time, the samples do not
      ticket = bridge.submit([PROMPT, PROMPT], SAMPLING, count=2, timeout_s=30)
      for got, sample in zip(await ticket.results(), want, strict=True):
        np.testing.assert_array_equal(got.tokens, sample.tokens)
        np.testing.assert_array_equal(got.log_probs_t, sample.log_probs_t)
        assert got.finish_reason == FinishReason.LENGTH
      assert ticket.done
      times = ticket.times
      order = [times.arrived_s, times.admitted_s, times.first_token_s, times.finished_s]
      assert order == sorted(order)

  with bridged(parts, scheduler) as (bridge, _):
    asyncio.run(ask(bridge))


def test_progress_is_the_beginning_of_what_comes(scheduler):
  request = GenerationRequest(group_id=0, sample_index=0, prompt_tokens=PROMPT, sampling=SAMPLING)
  assert scheduler.progress() == {}
  scheduler.submit(request)
  assert scheduler.step() == []
  partial = scheduler.progress()[(0, 0)]
  (sample,) = scheduler.generate_all([dataclasses.replace(request, group_id=1, rng_group_id=0)])
  size = len(partial.tokens)
  assert 0 < size < 40
  for name in ('tokens', 'log_probs_t', 'raw_log_probs_t', 'version_t'):
    np.testing.assert_array_equal(getattr(partial, name), getattr(sample, name)[:size])
    assert getattr(partial, name).dtype == getattr(sample, name).dtype


def test_admission_is_bounded_and_cancelling_makes_room(parts, scheduler):
  long = dataclasses.replace(SAMPLING, max_tokens=8000)

  async def ask(bridge):
    with pytest.raises(ValueError, match='7 samples in one request, but at most 6'):
      bridge.submit([PROMPT], long, count=7, timeout_s=30)
    with pytest.raises(PromptTooLongError, match='has 33 tokens'):
      bridge.submit([np.ones(33, np.int32)], long, timeout_s=30)
    assert bridge.in_flight == 0  # a refused call holds nothing
    tickets = [
      bridge.submit([PROMPT], long, count=3, timeout_s=30, streaming=True) for _ in range(2)
    ]
    with pytest.raises(OverloadedError, match='6 samples are in flight') as caught:
      bridge.submit([PROMPT], long, timeout_s=30)
    assert 1 <= caught.value.retry_after_s <= 60
    await tickets[0].updates()
    assert (bridge.view.running, bridge.view.waiting) == (4, 2)
    for ticket in tickets:
      bridge.cancel(ticket)
    start = time.monotonic()
    while bridge.in_flight:
      await asyncio.sleep(0.005)
      assert time.monotonic() < start + 5
    assert len(await bridge.submit([PROMPT], SAMPLING, count=6, timeout_s=30).results()) == 6

  with bridged(parts, scheduler) as (bridge, metrics):
    asyncio.run(ask(bridge))
    assert b'jetstream_slots_used_percentage 0.0' in metrics.text()


def test_prompts_of_a_cancelled_call_are_not_scored(parts, scheduler):
  model, sizes, _ = parts
  metrics = ServingMetrics(slots=sizes.slots, view=lambda: bridge.view)
  bridge = EngineBridge(scheduler, model=model.config, sizes=sizes, max_waiting=2, observer=metrics)

  async def ask():
    nothing = dataclasses.replace(SAMPLING, max_tokens=0)
    gone, kept = (
      bridge.submit([PROMPT] * 3, nothing, timeout_s=30, prompt_top=0) for _ in range(2)
    )
    assert bridge.in_flight == 6
    with pytest.raises(OverloadedError):
      bridge.submit([PROMPT], SAMPLING, timeout_s=30)
    bridge.cancel(gone)
    bridge.start()  # it was not there when they were cancelled
    assert [len(sample.tokens) for sample in await kept.results()] == [0] * 3
    assert (len(kept.scores), len(gone.scores), bridge.in_flight) == (3, 0, 0)
    await asyncio.to_thread(bridge.stop, 10)

  asyncio.run(ask())


def test_a_deadline_passes(parts, scheduler):
  async def ask(bridge):
    ticket = bridge.submit([PROMPT], dataclasses.replace(SAMPLING, max_tokens=8000), timeout_s=0.05)
    with pytest.raises(DeadlineError):
      await ticket.results()
    bridge.cancel(ticket)

  with bridged(parts, scheduler) as (bridge, _):
    asyncio.run(ask(bridge))


def test_the_end_is_told_to_everybody_who_waits(parts, scheduler):
  async def ask(bridge):
    long = dataclasses.replace(SAMPLING, max_tokens=8000)
    ticket = bridge.submit([PROMPT], long, timeout_s=30)
    await asyncio.to_thread(bridge.stop, 10)
    with pytest.raises(FleetError, match='has stopped'):
      await ticket.results()
    with pytest.raises(FleetError, match='has stopped'):
      bridge.submit([PROMPT], long, timeout_s=30)

  with bridged(parts, scheduler) as (bridge, _):
    asyncio.run(ask(bridge))
  assert bridge.failure is None


def test_a_reader_that_sleeps_finds_the_newest_state_only():
  async def read():
    request = GenerationRequest(group_id=0, sample_index=0, prompt_tokens=PROMPT, sampling=SAMPLING)
    ticket = Ticket([request], deadline_s=time.monotonic() + 5, streaming=True)
    for size in range(1, 1000):
      tokens = np.arange(size, dtype=np.int32)
      ticket.put([_update(tokens, None)])
    (news,) = await ticket.updates()
    assert len(news.tokens) == 999
    ticket.put([_update(np.arange(1000, dtype=np.int32), FinishReason.LENGTH)])
    assert len((await ticket.results())[0].tokens) == 1000
    assert await ticket.updates() == []

  asyncio.run(read())


def _update(tokens, reason):
  values = np.zeros(len(tokens), np.float32)
  return Update(0, tokens, values, values, tokens * 0, reason)


def test_seeds_of_requests_that_name_none_differ():
  seeds = {fresh_seed() for _ in range(100)}
  assert len(seeds) == 100 and all(0 <= seed < 2**32 for seed in seeds)
