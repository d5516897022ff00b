"""Names and options of strategies, requests for parts of samples, and independent samples."""

import inspect
import pathlib
import re

import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.objectives.boxes import box_options
from rlax_stack.rollout.strategies import TABLE, make_strategy
from rlax_stack.rollout.strategies.delethink import Delethink
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.plan import carry_out
from rlax_stack.rollout.strategies.prefix import Prefix
from rlax_stack.rollout.strategies.tree import Tree
from rlax_stack.types import Source

_PAGE = pathlib.Path(__file__).parents[4] / 'docs' / 'rollout.md'


def test_strategies_are_named_with_their_options():
  assert make_strategy('independent') == Independent()
  assert make_strategy('tree(roots=4, by="random")') == Tree(roots=4, by='random')
  assert make_strategy('tree(by="attention", distance=9)') == Tree(by='attention', distance=9)
  assert make_strategy('prefix(fractions=(0.25, 0.5))') == Prefix(fractions=(0.25, 0.5))
  assert make_strategy('delethink(chunk=32, carry=8)') == Delethink(chunk=32, carry=8)
  with pytest.raises(ConfigError, match="config.rollout.strategy names no box 'forest'"):
    make_strategy('forest')
  with pytest.raises(ConfigError, match="by of tree must be one of 'surprisal'"):
    make_strategy('tree(by="height")')
  with pytest.raises(ConfigError, match='carry of delethink must be from 0'):
    make_strategy('delethink(carry=-1)')


@pytest.mark.parametrize('name', TABLE)
def test_every_strategy_is_documented(name):
  """In its docstring, with a paper, and on the page."""
  box, page = TABLE[name], _PAGE.read_text()
  text = inspect.getdoc(box.function)
  assert 'https://arxiv.org/abs/' in text and f'| `{name}` |' in page
  for option, (_, default) in box_options(box).items():
    assert re.search(rf'^\s*{option}: ', text, re.M), f'{option} is not described'
    assert f'`{option}={default!r}`' in page


@pytest.mark.parametrize('name', TABLE)
def test_limits_hold_what_is_asked_for(name, make_task, tiny):
  """Requests and trajectories of every strategy, by default options, stay within its limits."""
  strategy, asked = make_strategy(name), []
  task, scheduler = make_task(max_tokens=12, metadata={'solution': '1 2 3 4 5 6'}), tiny.scheduler()

  def generate(requests):
    asked.extend(requests)
    return scheduler.generate_all(requests)

  done = carry_out([strategy.plan(task)], generate)
  limits, prompt = strategy.limits(12), len(task.prompt_tokens)
  assert [t.sample_index for t in done] == [0, 1, 2, 3]
  assert not list(strategy.problems(4))
  for request in asked:
    after = len(request.prompt_tokens) - prompt
    assert after <= limits.prefix and request.sampling.max_tokens <= limits.request
    assert after + request.sampling.max_tokens <= limits.context
  assert all(len(t.tokens) - prompt <= limits.span for t in done)
  assert len({request.identity for request in asked}) == len(asked)
  held_out = strategy.for_evaluation
  assert held_out == (strategy if name in ('independent', 'delethink') else Independent())


def test_a_request_for_a_part_of_a_sample(make_task):
  task = make_task(size=2, greedy=True, max_tokens=10, min_tokens=6)
  assert list(task.extras) == [2]
  whole = task.request(1)
  assert (whole.identity, whole.sampling) == ((3, 1), task.samplings[1])
  np.testing.assert_array_equal(whole.prompt_tokens, task.prompt_tokens)
  part = task.request(1, after=np.array([5, 6], np.int32), used=4, stage=2, most=3, top_log_probs=7)
  assert part.identity == (3, 1 + 2 * 3)  # three samples a stage
  np.testing.assert_array_equal(part.prompt_tokens, [*task.prompt_tokens, 5, 6])
  sampling = part.sampling
  assert (sampling.max_tokens, sampling.min_tokens, sampling.top_log_probs) == (3, 2, 7)
  assert task.request(0, used=8).sampling.max_tokens == 2
  assert task.request(0, used=8).sampling.min_tokens == 0


def test_independent_samples_are_those_of_plain_requests(make_task, draw, tiny):
  task = make_task(size=3, greedy=True, max_tokens=7)
  plan = Independent().plan(task)
  assert [r.sample_index for r in plan.start()] == [3, 0, 1, 2]  # the greedy one in front
  done = draw(Independent(), task)
  want = tiny.scheduler().generate_all(
    [tiny.request(3, i, tokens=task.prompt_tokens, max_tokens=7) for i in range(3)]
    + [tiny.request(3, 3, tokens=task.prompt_tokens, max_tokens=7, temperature=0.0)]
  )
  for trajectory, sample in zip(done, want, strict=True):
    sampled = trajectory.source_t == Source.POLICY
    np.testing.assert_array_equal(trajectory.mask_t, sampled)
    np.testing.assert_array_equal(trajectory.tokens[sampled], sample.tokens)
    np.testing.assert_array_equal(trajectory.behaviour_log_probs_t[sampled], sample.log_probs_t)
    assert trajectory.branch is None and trajectory.context_starts == ()


def test_groups_are_drawn_side_by_side(make_task, tiny):
  tasks = [make_task(group=g, size=4, max_tokens=8) for g in (5, 2)]
  together = carry_out([Tree().plan(t) for t in tasks], tiny.scheduler().generate_all)
  apart = [
    t for task in tasks for t in carry_out([Tree().plan(task)], tiny.scheduler().generate_all)
  ]
  assert [(t.group_id, t.sample_index) for t in together] == [
    (g, i) for g in (2, 5) for i in range(4)
  ]
  for one, other in zip(together, sorted(apart, key=lambda t: t.group_id), strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.behaviour_log_probs_t, other.behaviour_log_probs_t)
