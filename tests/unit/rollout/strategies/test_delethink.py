"""Thinking in chunks against the plain decoder on each of its contexts."""

import itertools

import numpy as np
import pytest

from rlax_stack.rollout.strategies.delethink import Delethink
from rlax_stack.types import FinishReason, Source


def _contexts(trajectory, prompt):
  """Tokens after the prompt of each context, with where they begin."""
  edges = [prompt, *trajectory.context_starts, len(trajectory.tokens)]
  return [(a, trajectory.tokens[a:b]) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize('carry', [3, 0])
def test_chunks_are_sampled_after_prompt_and_carry_over(carry, make_task, draw, tiny):
  task = make_task(max_tokens=14)
  done = draw(Delethink(chunk=6, carry=carry), task)
  prompt = len(task.prompt_tokens)
  for trajectory in done:
    assert trajectory.num_sampled == 14 and trajectory.finish_reason == FinishReason.LENGTH
    sampled = trajectory.source_t == Source.POLICY
    np.testing.assert_array_equal(trajectory.mask_t, sampled)
    thought = trajectory.tokens[sampled]
    contexts = _contexts(trajectory, prompt)
    sizes = [6, 3, 3, 2] if carry else [6, 6, 2]
    assert [len(tokens) for _, tokens in contexts] == [sizes[0], *(carry + n for n in sizes[1:])]
    before = 0
    for (start, tokens), size in zip(contexts, sizes, strict=True):
      kept = len(tokens) - size
      np.testing.assert_array_equal(tokens[:kept], thought[before - kept : before])
      np.testing.assert_array_equal(tokens[kept:], thought[before : before + size])
      assert (trajectory.source_t[start : start + kept] == Source.GUIDE).all()
      # Each token is of the distribution after the prompt and this context alone.
      seen = np.concatenate([task.prompt_tokens, tokens])
      logits = tiny.log_softmax(tiny.full_logits(seen))[prompt + kept - 1 : -1]
      want = logits[np.arange(size), tokens[kept:]]
      got = trajectory.behaviour_log_probs_t[start + kept : start + len(tokens)]
      np.testing.assert_allclose(got, want, atol=1e-4)
      before += size
    assert (trajectory.behaviour_log_probs_t[~sampled] == 0).all()
    assert (trajectory.version_t[~sampled] == -1).all()


def test_a_stop_ends_the_sample_in_whatever_chunk(make_task, draw):
  """The stop token is one that the first sample draws in its second chunk."""
  strategy = Delethink(chunk=6, carry=2)
  free = draw(strategy, make_task(max_tokens=14))[0]
  thought = free.tokens[free.mask_t]
  stop = next(int(t) for t in thought[6:10] if t not in thought[:6])
  stopped = draw(strategy, make_task(max_tokens=14, stop_token_ids=(stop,)))[0]
  count = list(thought).index(stop) + 1
  assert stopped.finish_reason == FinishReason.STOP
  np.testing.assert_array_equal(stopped.tokens[stopped.mask_t], thought[:count])
  assert len(stopped.context_starts) == 1


def test_chunks_do_not_reuse_random_numbers(make_task, draw):
  """A prompt that is all there is to see at every chunk: what is drawn must differ from chunk to chunk."""
  done = draw(Delethink(chunk=4, carry=0), make_task(max_tokens=12, temperature=2.0))
  chunks = [t.tokens[6:].reshape(3, 4) for t in done]
  assert not any((c[0] == c[1]).all() or (c[1] == c[2]).all() for c in chunks)


def test_the_greedy_sample_thinks_in_chunks_too(make_task, draw, tiny):
  task = make_task(size=2, greedy=True, max_tokens=9)
  greedy = draw(Delethink(chunk=6, carry=2), task)[2]
  for start, tokens in _contexts(greedy, 6):
    kept = 2 if start > 6 else 0
    logits = tiny.full_logits(np.concatenate([task.prompt_tokens, tokens]))
    np.testing.assert_array_equal(logits[6 + kept - 1 : -1].argmax(-1), tokens[kept:])


def test_limits_and_problems():
  strategy = Delethink(chunk=6, carry=3)
  assert strategy.limits(14) == (3, 6, 6, 14 + 3 * 3, 0, None)
  assert strategy.limits(6) == (0, 6, 6, 6, 0, None)
  assert strategy.limits(4) == (0, 4, 4, 4, 0, None)
  assert not list(strategy.problems(4))
  assert 'carry=6 leaves nothing' in next(Delethink(chunk=6, carry=6).problems(4))
