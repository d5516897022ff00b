"""What is kept of a prompt's visits, what is learnt, and that it comes back from a checkpoint exactly."""

import json

import numpy as np
import pytest

from rlax_stack.data.prompt_history import HistorySettings, PromptHistory
from rlax_stack.types import (
  FinishReason,
  Group,
  Message,
  Past,
  Prompt,
  Reward,
  Source,
  Trajectory,
)

_PROMPT = np.array([7, 8], np.int32)


def _trajectory(group_id, index, value, size=4, kept=False, version=3):
  rng = np.random.default_rng([group_id, index])
  total = len(_PROMPT) + size
  source = np.array([Source.PROMPT] * 2 + [Source.POLICY] * size, np.int8)
  return Trajectory(
    group_id=group_id,
    sample_index=index,
    prompt_id='p',
    tokens=np.concatenate([_PROMPT, rng.integers(0, 50, size)]).astype(np.int32),
    source_t=source,
    mask_t=source == Source.POLICY,
    behaviour_log_probs_t=-rng.random(total).astype(np.float32),
    raw_log_probs_t=-rng.random(total).astype(np.float32),
    version_t=np.array([-1, -1] + [version] * size, np.int32),
    finish_reason=FinishReason.STOP,
    reward=Reward(value=value),
    kept_ids_t=rng.integers(0, 50, (total, 3)).astype(np.int32) if kept else None,
  )


def _group(group_id, values, name='p', **options):
  prompt = Prompt(prompt_id=name, messages=(Message(role='user', content='?'),), answer='')
  trajectories = tuple(_trajectory(group_id, i, v, **options) for i, v in enumerate(values))
  return Group(group_id=group_id, prompt=prompt, prompt_tokens=_PROMPT, trajectories=trajectories)


def test_the_best_of_the_last_visit_are_held():
  history = PromptHistory(HistorySettings(samples=2, best=True), seed=0)
  assert history.of('p') == Past()
  history.keep([_group(0, [1.0, 1.0, 1.0])])
  last = _group(5, [0.0, 0.25, 1.0, 0.5])
  history.keep([last])
  held = history.of('p').samples
  assert [sample.reward for sample in held] == [1.0, 0.5] and history.num_tokens == 8
  for sample, index in zip(held, (2, 3), strict=True):
    for name in ('tokens', 'behaviour_log_probs_t', 'raw_log_probs_t', 'version_t'):
      want = getattr(last.trajectories[index], name)[2:]
      np.testing.assert_array_equal(getattr(sample, name), want)


def test_any_samples_follow_from_the_seed():
  def drawn(seed, group_id):
    history = PromptHistory(HistorySettings(samples=1), seed=seed)
    history.keep([_group(group_id, [0.0, 1.0, 2.0, 3.0])])
    return history.of('p').samples[0].reward

  assert len({drawn(0, i) for i in range(30)}) == 4
  assert [drawn(1, i) for i in range(9)] == [drawn(1, i) for i in range(9)]


def test_tokens_that_no_policy_drew_are_not_held():
  history = PromptHistory(HistorySettings(samples=1), seed=0)
  history.keep([_group(0, [1.0], version=-1)])
  assert history.of('p').samples == ()


def test_memory_is_bounded_and_the_oldest_visit_goes_first():
  history = PromptHistory(HistorySettings(samples=1), seed=0, max_tokens=10)
  for i, name in enumerate('abca'):
    history.keep([_group(i, [1.0], name)])
  assert history.num_tokens == 8
  assert [bool(history.of(name).samples) for name in 'abc'] == [True, False, True]


def test_rates_and_model_follow_the_outcomes():
  history = PromptHistory(HistorySettings(success=True, max_tokens=8), seed=0)
  assert history.of('a').success_rate == 0.5
  np.testing.assert_array_equal(history.of('a').success_weights, [0, 1, 0, 0, 0])
  history.keep([_group(0, [1.0, 1.0], 'a'), _group(1, [0.0, -1.0], 'b')])
  # All prompts: (0.5 + 2) of (1 + 2) faded by 0.99 in between; a prompt counts for two samples of the average.
  average = (0.99 * (0.99 * 0.5 + 2) + 0) / (0.99 * (0.99 * 1 + 2) + 2)
  np.testing.assert_allclose(history.of('a').success_rate, (2 + 2 * average) / 4)
  np.testing.assert_allclose(history.of('b').success_rate, 2 * average / 4)
  np.testing.assert_allclose(history.of('new').success_rate, average)
  assert history.of('a').success_weights[0] != 0
  plain = PromptHistory(HistorySettings(samples=1), seed=0)
  plain.keep([_group(0, [1.0])])
  assert plain.of('p').success_weights is None and plain.of('p').success_rate == 0.5


@pytest.mark.parametrize('kept', [False, True])
def test_it_comes_back_exactly(kept):
  settings = HistorySettings(samples=2, success=True, max_tokens=8)
  one = PromptHistory(settings, seed=3)
  one.keep([_group(0, [0.0, 1.0, 1.0], 'a', kept=kept), _group(1, [0.5, 0.5], 'b', kept=kept)])
  two = PromptHistory(settings, seed=3)
  two.restore(json.loads(json.dumps(one.state())))
  for history in (one, two):
    history.keep([_group(2, [1.0, 0.0], 'a', kept=kept)])
  assert one.state() == two.state() and one.num_tokens == two.num_tokens == 16
  for name in 'ab':
    for mine, other in zip(one.of(name).samples, two.of(name).samples, strict=True):
      np.testing.assert_array_equal(mine.raw_log_probs_t, other.raw_log_probs_t)
      assert mine.tokens.dtype == other.tokens.dtype
      if kept:
        np.testing.assert_array_equal(mine.kept_ids_t, other.kept_ids_t)
