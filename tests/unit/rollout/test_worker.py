"""The worker against the real coordinator and parameter server: whole groups, versions, lost leases, guests, stops."""

import threading
import time

import numpy as np
import pytest

from rlax_stack.errors import PromptTooLongError
from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.strategies.delethink import Delethink
from rlax_stack.rollout.strategies.plan import Task, carry_out
from rlax_stack.rollout.strategies.prefix import Prefix
from rlax_stack.rollout.strategies.tree import Tree
from rlax_stack.rollout.trajectory import step_ends, text_places
from rlax_stack.rollout.worker import RolloutWorker
from rlax_stack.types import Message, Prompt, Reward, SamplingParams, Source

_GROUP, _BATCH = 3, 2


class _Tokenizer:
  stop_token_ids = (96,)

  def encode_chat(self, messages):
    return np.arange(1, 1 + len(messages[0].content), dtype=np.int32)

  def encode(self, text):
    return np.array([int(word) for word in text.split()], np.int32)

  def decode(self, ids):
    return ' '.join(str(i) for i in ids)


def _score(texts, prompts):
  return [Reward(value=float(len(text))) for text in texts]


def _prompts(length=7):
  number = 0
  while True:
    number += 1
    content = 'x' * (length + number % 3)
    yield Prompt(
      prompt_id=f'p{number}',
      messages=(Message(role='user', content=content),),
      answer='20 21 22 23',
    )


class _Run:
  """A coordinator, a server and a worker in a thread."""

  def __init__(self, tiny, length=7, greedy=False, swap_mode='in_place', staleness=0, **options):
    prompts = _prompts(length)
    self.coordinator = Coordinator(
      lambda: next(prompts),
      group_size=_GROUP,
      groups_per_batch=_BATCH,
      max_staleness=staleness,
      lease_timeout_s=60.0,
      greedy=greedy,
    )
    self.server = ParameterServer()
    self.params = tiny.params
    self.worker = RolloutWorker(
      Scheduler(tiny.engine(), swap_mode=swap_mode),
      tokenizer=_Tokenizer(),
      score=_score,
      sampling=SamplingParams(max_tokens=8),
      **options,
    )
    self.stop = threading.Event()
    self.error = None
    self.thread = threading.Thread(target=self._run)

  def _run(self):
    try:
      self.worker(self.coordinator, self.server, self.stop)
    except Exception as error:
      self.error = error
      self.coordinator.close(error)

  def publish(self, version):
    self.server.publish(version, self.params(version))
    self.coordinator.on_published(version)

  def __enter__(self):
    self.thread.start()
    return self

  def __exit__(self, *unused):
    self.stop.set()
    self.thread.join(60)
    self.coordinator.close()


def test_on_policy_loop_delivers_whole_groups_of_the_published_version(tiny):
  with _Run(tiny) as run:
    for version in range(3):
      run.publish(version)
      groups = run.coordinator.next_batch(version, timeout_s=60.0)
      assert [g.group_id for g in groups] == [2 * version, 2 * version + 1]
      for group in groups:
        assert len(group.trajectories) == _GROUP
        for trajectory in group.trajectories:
          sampled = trajectory.source_t == Source.POLICY
          assert (trajectory.version_t[sampled] == version).all()
          assert (trajectory.version_t[~sampled] == -1).all()
          assert 1 <= trajectory.num_sampled <= 8
          np.testing.assert_array_equal(trajectory.mask_t, sampled)
          assert (trajectory.behaviour_log_probs_t[~sampled] == 0).all()
          assert (trajectory.behaviour_log_probs_t[sampled] < 0).all()
          assert trajectory.text == _Tokenizer().decode(trajectory.tokens[sampled])
          assert trajectory.reward.value == len(trajectory.text)
          assert trajectory.prompt_id == group.prompt.prompt_id
      run.coordinator.mark_trained(groups)
  assert run.error is None
  assert run.worker.stats.groups_delivered >= 6
  assert run.worker.scheduler.stats.sampled_tokens > 0


@pytest.mark.parametrize('swap_mode', ['retract', 'drain'])
def test_weights_that_come_while_samples_run(tiny, swap_mode):
  """'drain': every sample is of one version. 'retract': later tokens are of the newer one. Groups are whole in both."""
  with _Run(tiny, swap_mode=swap_mode, staleness=2) as run:
    groups = []
    for version in range(6):
      run.publish(version)
      groups += run.coordinator.next_batch(version, timeout_s=60.0)
      run.coordinator.mark_trained(groups[-_BATCH:])
  assert run.error is None and len(groups) == 6 * _BATCH
  for trajectory in (t for group in groups for t in group.trajectories):
    versions = trajectory.version_t[trajectory.source_t == Source.POLICY]
    assert (np.diff(versions) >= 0).all()
    if swap_mode == 'drain':
      assert len(set(versions.tolist())) == 1
  newest = max(t.version_t.max() for group in groups for t in group.trajectories)
  assert newest >= 3  # staleness is at most 2: the weights did change


def test_a_greedy_sample_is_drawn_beside_every_group(tiny):
  with _Run(tiny, greedy=True) as run:
    run.publish(0)
    groups = run.coordinator.next_batch(0, timeout_s=60.0)
  assert run.error is None
  for group in groups:
    assert len(group.trajectories) == _GROUP
    sampled = group.greedy.source_t == Source.POLICY
    prompt = group.greedy.tokens[~sampled]
    np.testing.assert_array_equal(prompt, group.prompt_tokens)
    # Each of its tokens is the likeliest one under the weights of the group.
    for place in np.flatnonzero(sampled):
      logits = tiny.full_logits(group.greedy.tokens[:place], tiny.params(0))
      assert group.greedy.tokens[place] == np.argmax(logits[-1])
    assert (group.greedy.version_t[sampled] == 0).all()
    assert group.greedy.reward.value == len(group.greedy.text)
    # The samples are those that a worker without a greedy sample draws.
    request = tiny.request(group.group_id, 1, tokens=prompt, max_tokens=8, stop_token_ids=(96,))
    (want,) = tiny.scheduler().generate_all([request])
    np.testing.assert_array_equal(group.trajectories[1].tokens[len(prompt) :], want.tokens)


@pytest.mark.parametrize(
  'strategy', [Tree(roots=1, by='random'), Delethink(chunk=4, carry=2), Prefix(field='')]
)
def test_groups_of_a_strategy_are_those_drawn_by_its_plan(tiny, strategy):
  """Through lease, scheduler, scoring and delivery, with a greedy sample beside each group."""
  with _Run(tiny, greedy=True, strategy=strategy) as run:
    run.publish(0)
    groups = run.coordinator.next_batch(0, timeout_s=60.0)
  assert run.error is None and len(groups) == _BATCH
  for group in groups:
    task = Task(
      group_id=group.group_id,
      prompt=group.prompt,
      prompt_tokens=group.prompt_tokens,
      samplings=(SamplingParams(max_tokens=8, stop_token_ids=(96,)),) * _GROUP
      + (SamplingParams(max_tokens=8, stop_token_ids=(96,), temperature=0.0),),
      group_size=_GROUP,
      version=0,
      tokenizer=_Tokenizer(),
    )
    want = carry_out([strategy.plan(task)], tiny.scheduler().generate_all)
    for got, other in zip((*group.trajectories, group.greedy), want, strict=True):
      assert (got.sample_index, got.branch) == (other.sample_index, other.branch)
      assert got.context_starts == other.context_starts
      for name in ('tokens', 'source_t', 'mask_t', 'behaviour_log_probs_t', 'version_t'):
        np.testing.assert_array_equal(getattr(got, name), getattr(other, name))
      assert got.text == _Tokenizer().decode(got.tokens[text_places(got)])
      assert got.reward.value == len(got.text)


def test_ends_of_steps_are_found_in_tokens():
  def decode(ids):
    return ''.join(f'{i}\n' for i in ids)

  tokens = np.array([5, 16, 7, 8], np.int32)  # 5, 16, 7 and 8 end at characters 2, 5, 7 and 9
  assert step_ends(tokens, [1, 2, 3, 5, 9, 99], decode) == (1, 1, 2, 2, 4, 4)
  assert step_ends(tokens, [], decode) == ()


def test_rewards_of_steps_reach_the_trajectory(tiny, monkeypatch):
  def by_token(texts, prompts):
    ends = [[i for i, c in enumerate(text) if c == ' '] for text in texts]
    return [Reward(value=1.0, step_values=(0.5,) * len(e), step_ends=tuple(e)) for e in ends]

  monkeypatch.setitem(globals(), '_score', by_token)
  with _Run(tiny) as run:
    run.publish(0)
    groups = run.coordinator.next_batch(0, timeout_s=60.0)
  for group in groups:
    for trajectory in group.trajectories:
      # Every token but the last is followed by a blank, so a step ends after each of them.
      start, count = len(group.prompt_tokens), trajectory.num_sampled
      assert trajectory.step_ends == tuple(range(start + 1, start + count))


def test_guest_requests_run_between_chunks(tiny):
  with _Run(tiny) as run:
    run.publish(0)
    snapshot = run.server.latest()
    requests = [tiny.request(10**6, i, temperature=0.0) for i in range(2)]
    samples = run.worker.generate_all(requests, snapshot)
    want = tiny.scheduler().generate_all(requests)
    for got, other in zip(samples, want, strict=True):
      np.testing.assert_array_equal(got.tokens, other.tokens)
    assert len(run.coordinator.next_batch(0, timeout_s=60.0)) == _BATCH
  assert run.error is None


class _HeldUp(Scheduler):
  """Weights after the first are ready when they are let go."""

  go = threading.Event()

  def prepare(self, params):
    if self.version >= 0:
      self.go.wait(60)
    return super().prepare(params)


def test_weights_are_prepared_beside_decoding(tiny):
  scheduler = _HeldUp(tiny.engine())
  worker = RolloutWorker(
    scheduler, tokenizer=_Tokenizer(), score=_score, sampling=SamplingParams(max_tokens=8)
  )
  server = ParameterServer()
  server.publish(0, tiny.params(0))
  worker._pull(server.latest())
  request = tiny.request(0, 0, max_tokens=20, temperature=0.7)
  scheduler.submit(request)
  scheduler.step()  # the first token and a chunk of 6
  server.publish(1, tiny.params(1))
  worker._pull(server.latest())
  scheduler.step()  # goes on under the old weights
  assert (scheduler.version, worker.stats.swaps) == (0, 1)
  scheduler.go.set()
  worker._coming[1].result()
  worker._pull(server.latest())
  assert (scheduler.version, worker.stats.swaps) == (1, 2)
  (done,) = [*scheduler.step(), *scheduler.step()]
  np.testing.assert_array_equal(done.version_t, [0] * 13 + [1] * 7)
  # The bits of weights that came in one call at the same place.
  other = tiny.scheduler()
  other.submit(request)
  other.step()
  other.step()
  other.swap_params(tiny.params(1), 1)
  (want,) = [*other.step(), *other.step()]
  np.testing.assert_array_equal(done.tokens, want.tokens)
  np.testing.assert_array_equal(done.raw_log_probs_t, want.raw_log_probs_t)


def test_guests_get_the_weights_they_name_although_rows_decode(tiny):
  worker = RolloutWorker(
    tiny.scheduler(), tokenizer=_Tokenizer(), score=_score, sampling=SamplingParams(max_tokens=8)
  )
  server = ParameterServer()
  worker.scheduler.submit(tiny.request(1, 0, max_tokens=24))
  worker.scheduler.step()
  for version in (1, 2):
    server.publish(version, tiny.params(version))
    worker._pull(server.latest())  # on their way, perhaps
  (sample,) = worker.generate_all([tiny.request(10**6, 0)], server.latest())
  assert (sample.version_t == 2).all()


def test_a_lost_lease_is_forgotten(tiny):
  run = _Run(tiny, extend_every_s=0.0)
  run.coordinator.on_published(0)
  lease = run.coordinator.lease('rollout-0')
  run.server.publish(0, tiny.params(0))
  run.worker._pull(run.server.latest())
  run.worker._start_group(lease)
  run.coordinator.fail(lease, 'taken away')
  run.coordinator.lease('another')
  run.worker._heartbeat(run.coordinator)
  assert run.worker.stats.groups_lost == 1
  assert not run.worker.scheduler.has_work


def test_too_long_prompt_stops_the_run_with_its_cure(tiny):
  with _Run(tiny, length=40) as run:
    run.publish(0)
    with pytest.raises(PromptTooLongError, match='max_prompt_tokens'):
      run.coordinator.next_batch(0, timeout_s=60.0)


def test_stop_event_ends_an_idle_worker_at_once(tiny):
  run = _Run(tiny)
  with run:
    time.sleep(0.05)
    start = time.monotonic()
  assert not run.thread.is_alive()
  assert time.monotonic() - start < 5
  assert run.error is None
