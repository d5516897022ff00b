"""Samples that begin with a past one: what is taken over, with which log-probs, and what is trained on."""

import dataclasses

import numpy as np
import pytest

from rlax_stack import assembly, command_line, objective_rules
from rlax_stack.data.prompt_history import HistorySettings, PromptHistory
from rlax_stack.rollout.strategies import make_strategy, trains_on_the_past
from rlax_stack.rollout.strategies.replay import Replay
from rlax_stack.types import Group, Past, PastSample, Reward, Source


def _past(*sizes):
  rng = np.random.default_rng(0)
  return Past(
    samples=tuple(
      PastSample(
        tokens=rng.integers(2, 40, size).astype(np.int32),
        behaviour_log_probs_t=-rng.random(size).astype(np.float32),
        raw_log_probs_t=-rng.random(size).astype(np.float32),
        version_t=np.full(size, 4, np.int32),
        reward=1.0,
      )
      for size in sizes
    )
  )


@pytest.mark.parametrize('trains', ['all', 'own'])
def test_what_is_taken_over(trains, make_task, draw, tiny):
  past = _past(10)
  task = make_task(size=4, greedy=True, past=past)
  done = draw(Replay(fractions=(0.2, 0.5), trains=trains), task)
  sample = past.samples[0]
  for trajectory, taken in zip(done, (2, 5, 0, 0, 0), strict=True):
    guide = trajectory.source_t == Source.GUIDE
    np.testing.assert_array_equal(np.flatnonzero(guide), np.arange(6, 6 + taken))
    for name in ('tokens', 'behaviour_log_probs_t', 'raw_log_probs_t', 'version_t'):
      np.testing.assert_array_equal(getattr(trajectory, name)[guide], getattr(sample, name)[:taken])
    assert trajectory.mask_t[6 + taken :].all() and not trajectory.mask_t[:6].any()
    assert (trajectory.mask_t[guide] == (trains == 'all')).all()
    assert trajectory.num_sampled + taken == 12 and trajectory.oldest_version == 0
    # The rest is the current policy's, after prompt and prefix.
    start = 6 + taken
    logits = tiny.log_softmax(tiny.full_logits(trajectory.tokens))[start - 1 : -1]
    if trajectory.sample_index < 4:
      want = logits[np.arange(len(logits)), trajectory.tokens[start:]]
      np.testing.assert_allclose(trajectory.behaviour_log_probs_t[start:], want, atol=1e-4)


def test_past_samples_take_turns_and_never_whole(make_task, draw):
  past = _past(3, 30)
  done = draw(Replay(replayed=1.0, fractions=(1.0,)), make_task(size=4, past=past))
  counts = [int((t.source_t == Source.GUIDE).sum()) for t in done]
  assert sorted(counts) == [2, 2, 11, 11] and counts[0] != counts[1]
  assert all(t.num_sampled >= 1 for t in done)


def test_the_first_visit_is_drawn_from_the_prompt(make_task, draw, tiny):
  task = make_task()
  done = draw(Replay(), task)
  requests = [tiny.request(3, i, tokens=task.prompt_tokens) for i in range(4)]
  plain = tiny.scheduler().generate_all(requests)
  for trajectory, sample in zip(done, plain, strict=True):
    np.testing.assert_array_equal(trajectory.tokens[6:], sample.tokens)
    assert not (trajectory.source_t == Source.GUIDE).any()


def test_a_second_visit_goes_on_from_the_first(make_task, draw):
  """From a group that was trained, through the history, into the next group."""
  strategy = Replay(replayed=0.25, fractions=(0.5,), choose='best')
  history = PromptHistory(strategy.limits(12).history, seed=0)
  assert strategy.limits(12).history == HistorySettings(samples=1, best=True)
  first = draw(strategy, make_task())
  rewarded = [_scored(t, float(t.sample_index == 2)) for t in first]
  history.keep([_as_group(make_task(), rewarded)])
  second = draw(
    strategy, make_task(group=9, tokens=make_task().prompt_tokens, past=history.of('p3'))
  )
  np.testing.assert_array_equal(second[0].tokens[6:12], first[2].tokens[6:12])
  # The next visit may hold what was taken over as well: every token has the log-prob it was drawn with.
  history.keep([_as_group(make_task(), [_scored(t, float(t.sample_index == 0)) for t in second])])
  held = history.of('p3').samples[0]
  np.testing.assert_array_equal(held.behaviour_log_probs_t, second[0].behaviour_log_probs_t[6:])
  np.testing.assert_array_equal(
    held.behaviour_log_probs_t[:6], first[2].behaviour_log_probs_t[6:12]
  )


def _scored(trajectory, value):
  return dataclasses.replace(trajectory, reward=Reward(value=value))


def _as_group(task, trajectories):
  return Group(
    group_id=task.group_id,
    prompt=task.prompt,
    prompt_tokens=task.prompt_tokens,
    trajectories=tuple(trajectories),
  )


def test_what_cannot_work_is_refused():
  assert not list(Replay().problems(4))
  assert 'fractions must be above 0' in next(Replay(fractions=()).problems(4))
  assert 'is none' in next(Replay(replayed=0.1).problems(4))


def test_tokens_of_the_past_make_the_run_off_policy():
  def config(strategy):
    flags = ['launch', '--config=configs/quickstart.py', f'--config.rollout.strategy={strategy}']
    return command_line.parse(flags)[0]

  assert trains_on_the_past(make_strategy('replay')) and not trains_on_the_past(
    Replay(trains='own')
  )
  for strategy, found in (
    ('replay', True),
    ('replay(trains="own")', False),
    ('independent', False),
  ):
    assert objective_rules.off_policy(config(strategy)) == found
  coordinator = assembly.make_coordinator(config('replay'), _Iterator())
  assert coordinator.state()['groups']['history']['samples'] == {}
  coordinator = assembly.make_coordinator(config('independent'), _Iterator())
  assert coordinator.state()['groups']['history'] is None


class _Iterator:
  def next(self):
    raise StopIteration

  def get_state(self):
    return {}
