"""Trees whose branches leave where later tokens look most."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.rollout.strategies.branch_points import candidates
from rlax_stack.rollout.strategies.tree import Tree
from rlax_stack.types import Branch

_PROMPT = 6


def _received(scheduler, trajectory, distance):
  """Attention that the tokens after the prompt get, float64 [T]."""
  return scheduler.attention_received(trajectory.tokens, distance)[_PROMPT:].astype(np.float64)


def test_branches_leave_at_the_tokens_with_most_attention(make_task, draw, tiny):
  scheduler = tiny.scheduler()
  done = draw(Tree(roots=2, by='attention', distance=2), make_task(size=6, greedy=True), scheduler)
  for root in (0, 1):
    received = _received(scheduler, done[root], 2)
    best = _PROMPT + 1 + np.argsort(-received[1:], kind='stable')[:2]
    branches = [t.branch for t in done[2 + 2 * root : 4 + 2 * root]]
    assert branches == [Branch(root, root, int(place)) for place in best]


def test_branches_leave_at_the_step_with_most_attention(make_task, draw, tiny):
  scheduler, checked = tiny.scheduler(), 0
  strategy = Tree(roots=4, at='step', by='attention', separator='\n', distance=3)
  done = draw(strategy, make_task(group=8, size=8, max_tokens=24), scheduler)
  for root in range(4):
    tokens, received = done[root].tokens[_PROMPT:], _received(scheduler, done[root], 3)
    starts = [i + 1 for i in range(len(tokens) - 1) if tokens[i] % 7 == 0]
    starts = [i for i in starts if tokens[i] % 7]  # line ends that follow each other are one
    if not starts:
      assert done[4 + root].branch == Branch(root, root, _PROMPT)
      continue
    means = [
      received[start:end].mean() for start, end in zip(starts, [*starts[1:], None], strict=True)
    ]
    best = starts[int(np.argmax(means))]
    checked += len(starts) > 1
    assert done[4 + root].branch == Branch(root, root, _PROMPT + best)
  assert checked


def test_only_samples_that_branches_may_leave_ask_for_attention(make_task, tiny):
  strategy, scheduler = Tree(roots=1, rounds=2, by='attention', distance=5), tiny.scheduler()
  plan = strategy.plan(make_task(size=4, greedy=True))
  requests = plan.start()
  asked = []
  while requests:
    asked.append([r.attention_distance for r in requests])
    samples = scheduler.generate_all(requests)
    requests = [r for sample in samples for r in plan.take(sample)[0]]
  assert asked == [[0, 5], [5, 5], [0]]
  other = Tree(roots=1, by='surprisal').plan(make_task(size=2))
  assert [r.attention_distance for r in other.start()] == [0]


def test_scores_of_steps_by_hand(make_task, tiny):
  (sample,) = tiny.scheduler().generate_all([tiny.request(3, 4, max_tokens=6)])
  options = {'by': 'attention', 'separator': '\n', 'decode': make_task().tokenizer.decode}
  with pytest.raises(ValueError, match='need attention_distance'):
    candidates(sample, 4, np.zeros(0, np.int32), at='token', **options)
  sample = dataclasses.replace(
    sample,
    tokens=np.array([7, 5, 14, 9, 8, 3], np.int32),
    attention_t=np.array([9, 1, 2, 6, 4, 2], np.float32),
  )
  tokens = candidates(sample, 4, np.array([1], np.int32), at='token', **options)
  assert [(c.depth, c.score) for c in tokens] == [(2, 1), (3, 2), (4, 6), (5, 4), (6, 2)]
  steps = candidates(sample, 4, np.array([1], np.int32), at='step', **options)
  assert [(c.depth, c.score) for c in steps] == [(2, 1.5), (4, 4.0)]
