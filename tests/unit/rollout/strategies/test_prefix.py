"""Guided samples: what is given, what is trained on, and how much of it when."""

import numpy as np
import pytest

from rlax_stack.errors import DataError
from rlax_stack.rollout.strategies.prefix import Prefix
from rlax_stack.rollout.trajectory import text_places
from rlax_stack.types import Source

_SOLUTION = ' '.join(str(i) for i in range(20, 40))  # 20 tokens


def _guides(trajectories, prompt=6):
  return [int((t.source_t == Source.GUIDE).sum()) for t in trajectories]


def test_half_of_the_group_is_guided(make_task, draw, tiny):
  task = make_task(size=4, greedy=True, metadata={'solution': _SOLUTION}, max_tokens=12)
  done = draw(Prefix(guided=0.5, fractions=(0.25,)), task)
  assert _guides(done) == [5, 5, 0, 0, 0]
  for trajectory in done[:2]:
    np.testing.assert_array_equal(trajectory.tokens[6:11], range(20, 25))
    assert not trajectory.mask_t[:11].any() and trajectory.mask_t[11:].all()
    assert trajectory.num_sampled == 7  # of 12 with what was given
    logits = tiny.log_softmax(tiny.full_logits(trajectory.tokens))[10:-1]
    want = logits[np.arange(7), trajectory.tokens[11:]]
    np.testing.assert_allclose(trajectory.behaviour_log_probs_t[11:], want, atol=1e-4)
    # The verifier reads the guide as part of the answer.
    np.testing.assert_array_equal(text_places(trajectory), np.arange(6, 18))
  plain = [tiny.request(3, i, tokens=task.prompt_tokens) for i in (2, 3)]
  for trajectory, sample in zip(done[2:4], tiny.scheduler().generate_all(plain), strict=True):
    np.testing.assert_array_equal(trajectory.tokens[6:], sample.tokens)


def test_fractions_take_turns_and_shrink_with_the_weights(make_task, draw):
  strategy = Prefix(guided=1.0, fractions=(0.1, 0.3), decay_versions=10)
  for version, want in ((0, [2, 6, 2, 6]), (5, [1, 3, 1, 3]), (10, [0] * 4), (99, [0] * 4)):
    task = make_task(metadata={'solution': _SOLUTION}, version=version)
    assert _guides(draw(strategy, task)) == want


def test_something_is_left_to_sample(make_task, draw):
  task = make_task(metadata={'solution': _SOLUTION}, max_tokens=8, min_tokens=2)
  done = draw(Prefix(guided=1.0, fractions=(1.0,)), task)
  assert _guides(done) == [7] * 4 and [t.num_sampled for t in done] == [1] * 4


def test_where_the_solution_comes_from(make_task, draw):
  answer = make_task(answer='21 22 23 24')
  assert _guides(draw(Prefix(field='', fractions=(0.5,)), answer)) == [2, 2, 0, 0]
  empty = make_task(metadata={'solution': ''})
  assert _guides(draw(Prefix(), empty)) == [0] * 4
  with pytest.raises(DataError, match=r"prompt p3 has no text 'solution' .* only \['hint'\]"):
    Prefix().plan(make_task(metadata={'hint': 'x'}))
  for fractions in ((), (0.0,), (1.5,)):
    assert 'fractions must be above 0' in next(Prefix(fractions=fractions).problems(4))
