"""Trajectories from spans: sources, masks, contexts, text and ends of steps."""

import dataclasses

import numpy as np

from rlax_stack.rollout.trajectory import (
  assemble,
  given_span,
  make_trajectory,
  sampled_span,
  scored,
  text_places,
)
from rlax_stack.types import KEPT_OVERFLOW, Branch, FinishReason, Reward, Source


def _decode(ids):
  return ''.join(f'{i}\n' for i in ids)


def _sample(tiny, **sampling):
  return tiny.scheduler().generate_all([tiny.request(1, 0, **{'max_tokens': 5} | sampling)])[0]


def test_one_turn(tiny):
  sample = _sample(tiny)
  made = make_trajectory(sample, prompt_id='p', text='t', reward=Reward(value=1.0))
  start = len(sample.request.prompt_tokens)
  np.testing.assert_array_equal(made.tokens, [*sample.request.prompt_tokens, *sample.tokens])
  np.testing.assert_array_equal(made.mask_t, np.arange(start + 5) >= start)
  np.testing.assert_array_equal(made.raw_log_probs_t[start:], sample.raw_log_probs_t)
  np.testing.assert_array_equal(made.version_t, [-1] * start + [0] * 5)
  assert (made.text, made.reward, made.trajectory_id) == ('t', Reward(value=1.0), '1/0')


def test_sets_of_spans_are_joined_and_tokens_without_room_are_not_trained(tiny):
  sample = _sample(tiny)
  assert make_trajectory(sample, prompt_id='p').kept_ids_t is None
  kept = np.array([[4, 5], [6, -1], [KEPT_OVERFLOW, -1], [-1, -1], [7, 8]], np.int32)
  with_sets = dataclasses.replace(sample, kept_ids_t=kept)
  spans = [
    sampled_span(with_sets).first(3, trained=True),
    given_span(np.array([50, 51]), source=Source.GUIDE, new_context=True),
    sampled_span(with_sets, trained=False),
    sampled_span(sample),
  ]
  made = assemble(
    np.array([9], np.int32),
    spans,
    group_id=0,
    sample_index=0,
    prompt_id='p',
    finish_reason=FinishReason.STOP,
  )
  none = [[-1, -1]]
  want = [*none, *kept[:3].tolist(), *none * 2, *kept.tolist(), *none * 5]
  assert made.kept_ids_t.tolist() == want and made.kept_ids_t.dtype == np.int32
  np.testing.assert_array_equal(made.mask_t, [0, 1, 1, 0, 0, 0, *[0] * 5, *[1] * 5])
  assert made.num_sampled == 13 and made.kept_overflow_t.sum() == 2


def test_spans_of_several_contexts(tiny):
  sample = _sample(tiny)
  spans = [
    given_span(np.array([50, 51]), source=Source.GUIDE),
    sampled_span(sample),
    given_span(sample.tokens[-2:], source=Source.GUIDE, new_context=True),
    sampled_span(sample, trained=False).first(3, trained=True),
  ]
  made = assemble(
    np.array([7, 8, 9], np.int32),
    spans,
    group_id=4,
    sample_index=2,
    prompt_id='p',
    finish_reason=FinishReason.STOP,
    branch=Branch(0, 1, 5),
  )
  t = sample.tokens.tolist()
  np.testing.assert_array_equal(made.tokens, [7, 8, 9, 50, 51, *t, *t[-2:], *t[:3]])
  np.testing.assert_array_equal(made.source_t, [0] * 3 + [3] * 2 + [1] * 5 + [3] * 2 + [1] * 3)
  np.testing.assert_array_equal(made.mask_t, made.source_t == Source.POLICY)
  np.testing.assert_array_equal(made.behaviour_log_probs_t[12:], sample.log_probs_t[:3])
  assert made.context_starts == (10,) and made.branch == Branch(0, 1, 5)
  # What is carried over is said once; what was given at the start is said.
  np.testing.assert_array_equal(text_places(made), [*range(3, 10), *range(12, 15)])
  text = _decode(made.tokens[text_places(made)])
  lengths = np.cumsum([len(line) + 1 for line in text.splitlines()]).tolist()
  reward = Reward(value=1.0, step_values=(0.5,) * 3, step_ends=(lengths[1], lengths[6], lengths[7]))
  got = scored(made, text, reward, _decode)
  # After the guide, after the first context, and after the first token of the second.
  assert (got.text, got.reward, got.step_ends) == (text, reward, (5, 10, 13))
