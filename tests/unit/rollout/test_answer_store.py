"""Earlier answers as drafts: what is held, and that only speed depends on it."""

import dataclasses
import threading

import numpy as np
import pytest

from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.rollout.answer_store import AnswerStore, prompt_noise
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.worker import RolloutWorker
from rlax_stack.types import Message, Prompt, Reward, SamplingParams


def _sample(tiny, group, index, tokens):
  request = tiny.request(group, index)
  return dataclasses.replace(
    tiny.scheduler().generate_all([request])[0], tokens=np.array(tokens, np.int32)
  )


def test_the_answer_of_the_last_visit_is_the_draft(tiny):
  store = AnswerStore(coupled=False)
  request = tiny.request(3, 1)
  assert store.drafted(request, 'p').draft_tokens is None
  store.keep(_sample(tiny, 0, 1, [5, 6, 7]), 'p')
  store.keep(_sample(tiny, 0, 0, [9]), 'p')
  store.keep(_sample(tiny, 1, 1, [5, 8]), 'p')
  drafted = store.drafted(request, 'p')
  np.testing.assert_array_equal(drafted.draft_tokens, [5, 8])
  assert drafted.rng_group_id is None and drafted.identity == request.identity
  assert store.drafted(tiny.request(3, 2), 'p').draft_tokens is None
  assert store.num_tokens == 3


def test_prompts_visited_longest_ago_go_first(tiny):
  store = AnswerStore(coupled=True, max_tokens=7)
  for prompt in ('a', 'b', 'a', 'c'):
    store.keep(_sample(tiny, 0, 0, [1, 2, 3]), prompt)
  assert store.num_tokens == 6
  has = {p: store.drafted(tiny.request(0, 0), p).draft_tokens is not None for p in 'abc'}
  assert has == {'a': True, 'b': False, 'c': True}
  store.keep(_sample(tiny, 0, 0, range(9)), 'd')  # more than all of the room: it alone stays
  assert store.num_tokens == 9


def test_noise_names_the_prompt_and_nothing_else(tiny):
  assert prompt_noise('gsm8k/17') == prompt_noise('gsm8k/17') != prompt_noise('gsm8k/18')
  assert all(0 <= prompt_noise(str(i)) < 2**31 for i in range(50))
  drafted = AnswerStore(coupled=True).drafted(tiny.request(4, 1), 'p')
  assert drafted.rng_group_id == prompt_noise('p')


class _Tokenizer:
  stop_token_ids = (96,)

  def encode_chat(self, messages):
    return np.arange(1, 9, dtype=np.int32)

  def encode(self, text):
    return np.array([ord(c) for c in text], np.int32)

  def decode(self, ids):
    return ' '.join(str(i) for i in ids)


def _visits(tiny, engine, answers):
  """Tokens of two visits of one prompt under the same weights, and the worker that drew them."""
  prompt = Prompt(prompt_id='p', messages=(Message(role='user', content='x'),), answer='')
  coordinator = Coordinator(
    lambda: prompt, group_size=3, groups_per_batch=1, max_staleness=0, lease_timeout_s=60.0
  )
  server, stop = ParameterServer(), threading.Event()
  worker = RolloutWorker(
    tiny.scheduler(of=lambda: engine),
    tokenizer=_Tokenizer(),
    score=lambda texts, prompts: [Reward(value=1.0) for _ in texts],
    sampling=SamplingParams(max_tokens=16),
    answers=answers,
  )
  thread = threading.Thread(target=worker, args=(coordinator, server, stop))
  thread.start()
  visits = []
  try:
    for version in range(2):
      server.publish(version, tiny.params())
      coordinator.on_published(version)
      (group,) = coordinator.next_batch(version, timeout_s=60.0)
      coordinator.mark_trained([group])
      visits.append([trajectory.tokens.tolist() for trajectory in group.trajectories])
  finally:
    stop.set()
    thread.join(60)
    coordinator.close()
  return visits, worker


@pytest.fixture(scope='module')
def drafting(tiny):
  return Engine(tiny.MODEL, dataclasses.replace(tiny.SIZES, max_draft=3))


def test_a_coupled_visit_under_the_same_weights_is_all_draft(tiny, drafting):
  (first, second), worker = _visits(tiny, drafting, AnswerStore(coupled=True))
  assert first == second
  stats = worker.scheduler.stats
  assert stats.accepted_tokens > 0.4 * sum(len(tokens) - 8 for tokens in second)
  accepted = worker.figures()['rollout/drafts_accepted']
  assert accepted == stats.accepted_tokens / stats.drafted_tokens > 0.8


def test_an_independent_visit_draws_what_it_draws_without_drafts(tiny, drafting):
  (first, second), _ = _visits(tiny, drafting, AnswerStore(coupled=False))
  assert first != second
  plain, _ = _visits(tiny, drafting, None)
  assert [first, second] == plain
