"""Trees of samples: where branches leave, what they take over, and what is trained on."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.rollout.strategies.branch_points import (
  Candidate,
  candidates,
  choose,
  entropies,
  step_starts,
)
from rlax_stack.rollout.strategies.tree import Tree
from rlax_stack.types import Branch, FinishReason, Past

_PROMPT = 6


def _agree(one, other):
  """How many leading tokens two trajectories share."""
  n = min(len(one.tokens), len(other.tokens))
  same = one.tokens[:n] == other.tokens[:n]
  return n if same.all() else int(same.argmin())


def _surprisal_points(trajectory, count, start=_PROMPT + 1):
  """Places of the least likely tokens, the least likely first."""
  values = trajectory.raw_log_probs_t.copy()
  values[:start] = 0
  return np.argsort(values, kind='stable')[:count].tolist()


def test_branches_leave_at_the_most_surprising_tokens(make_task, draw, tiny):
  task = make_task(size=8, greedy=True)
  done = draw(Tree(roots=2, by='surprisal', per_point=2), task)
  assert [t.branch and t.branch.root for t in done] == [None, None, 0, 0, 0, 1, 1, 1, None]
  for root in (0, 1):
    first, second = _surprisal_points(done[root], 2)
    branches = done[2 + 3 * root : 5 + 3 * root]
    assert [t.branch for t in branches] == [
      Branch(root, root, first),
      Branch(root, root, first),
      Branch(root, root, second),
    ]
    for trajectory in branches:
      length, parent = trajectory.branch.length, done[root]
      assert _agree(trajectory, parent) >= length
      for name in ('behaviour_log_probs_t', 'raw_log_probs_t', 'version_t', 'source_t'):
        taken = getattr(trajectory, name)[:length]
        np.testing.assert_array_equal(taken, getattr(parent, name)[:length])
      # Its own tokens are those of a sample after prompt and prefix, with the rest of the budget.
      request = tiny.request(
        3, trajectory.sample_index, tokens=parent.tokens[:length], max_tokens=12 + _PROMPT - length
      )
      (want,) = tiny.scheduler().generate_all([request])
      np.testing.assert_array_equal(trajectory.tokens[length:], want.tokens)
      assert trajectory.mask_t[_PROMPT:].all()
  for trajectory in done[:-1]:
    logits = tiny.log_softmax(tiny.full_logits(trajectory.tokens))[_PROMPT - 1 : -1]
    want = logits[np.arange(len(logits)), trajectory.tokens[_PROMPT:]]
    np.testing.assert_allclose(trajectory.behaviour_log_probs_t[_PROMPT:], want, atol=1e-4)


def test_branches_leave_at_the_highest_entropy(make_task, draw, tiny):
  engine = tiny.engine_with_tops()
  done = draw(Tree(roots=2, by='entropy'), make_task(), tiny.scheduler(of=lambda: engine))
  for root in (0, 1):
    log_probs = tiny.log_softmax(tiny.full_logits(done[root].tokens))[_PROMPT - 1 : -1]
    top = np.sort(log_probs, axis=-1)[:, -20:]
    rest = 1 - np.exp(top).sum(-1)
    entropy = -(np.exp(top) * top).sum(-1) - rest * np.log(rest)
    assert (entropy <= -(np.exp(log_probs) * log_probs).sum(-1)).all()
    want = _PROMPT + 1 + int(entropy[1:].argmax())
    assert done[2 + root].branch == Branch(root, root, want)
  plain = tiny.scheduler().generate_all([tiny.request(3)])[0]
  with pytest.raises(ValueError, match='entropies need top_log_probs'):
    entropies(plain)


def test_a_second_round_leaves_from_branches_too(make_task, draw):
  """The points of a round are the best of all the tree's own tokens."""
  done = draw(Tree(roots=1, rounds=3), make_task(size=4, max_tokens=16))
  assert done[1].branch.parent == 0
  for index in (2, 3):
    best = None
    for parent in done[:index]:
      start = (parent.branch.length if parent.branch else _PROMPT) + 1
      for place in range(start, len(parent.tokens)):
        key = (float(parent.raw_log_probs_t[place]), parent.sample_index, place)
        best = key if best is None else min(best, key)
    assert done[index].branch == Branch(0, best[1], best[2])
  assert {t.branch.root for t in done[1:]} == {0}


def test_branches_at_steps(make_task, draw):
  strategy = Tree(roots=2, at='step', by='spread', separator='\n')
  done = draw(strategy, make_task(group=8, size=6, max_tokens=20))
  checked = 0
  for trajectory in done[2:]:
    length, parent = trajectory.branch.length, done[trajectory.branch.parent]
    steps = [i + 1 for i in range(_PROMPT, len(parent.tokens) - 1) if parent.tokens[i] % 7 == 0]
    if steps:
      checked += 1
      assert length in steps
    else:
      assert length == _PROMPT  # nowhere to leave but at the prompt
  assert checked


def test_random_points_follow_from_the_seed(make_task, draw):
  strategy = Tree(roots=1, by='random')
  one, again, other = (
    [t.branch for t in draw(strategy, make_task(size=6, seed=seed))] for seed in (5, 5, 6)
  )
  assert one == again and one != other


def test_all_trees_share_branches_where_outcomes_may_differ(make_task, draw):
  """Points with p (1 − p) near 0 are not taken; the prompt is a point too."""
  # Nearly sure to succeed by now, save where the last tokens were unlikely: p is near 1/2 at the prompt alone.
  steep = np.array([0.0, 0.0, 0.0, -1e3, 0.0])
  task = make_task(size=7, past=Past(success_weights=steep))
  strategy = Tree(roots=2, rounds=2, by='mixed', per_point=3)
  assert strategy.pools() == 1 and strategy.limits(12).history.success
  done = draw(strategy, task)
  assert [t.branch for t in done[2:]] == [Branch(0, 0, _PROMPT)] * 5
  # A model that knows the rate alone finds all places alike: branches of both trees, and of branches.
  rate = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
  even = draw(
    Tree(roots=2, rounds=2, by='mixed'), make_task(size=30, past=Past(success_weights=rate))
  )
  assert {t.branch.root for t in even[2:]} == {0, 1}
  for trajectory in even[2:]:
    root, parent, length = trajectory.branch
    assert parent < trajectory.sample_index and _agree(trajectory, even[parent]) >= length
    assert root == parent if parent < 2 else root == even[parent].branch.root
  assert max(t.branch.parent for t in even[2:]) >= 2
  with pytest.raises(ValueError, match='need the weights of a success model'):
    draw(strategy, make_task(size=7))


def test_mixed_points_are_drawn_in_proportion():
  found = [Candidate(0, i, score) for i, score in enumerate([0.25, 0.05, 0.1, 0.0])]
  first = [choose(found, 1, 'mixed', (0, n))[0].depth for n in range(4000)]
  np.testing.assert_allclose(
    np.bincount(first, minlength=4) / 4000, [0.625, 0.125, 0.25, 0], atol=0.03
  )
  assert sorted(c.depth for c in choose(found, 9, 'mixed', (0,))) == [0, 1, 2, 3]


@pytest.mark.parametrize('trains', ['leaves', 'own', 'roots'])
def test_what_is_trained_on(trains, make_task, draw):
  for trajectory in draw(Tree(roots=2, trains=trains), make_task()):
    own = trajectory.branch.length if trajectory.branch else _PROMPT
    start = {'leaves': _PROMPT, 'own': own, 'roots': _PROMPT if own == _PROMPT else 10**6}[trains]
    np.testing.assert_array_equal(trajectory.mask_t, np.arange(len(trajectory.tokens)) >= start)


def test_the_order_in_which_samples_end_changes_nothing(make_task, tiny):
  found = []
  for backwards in (False, True):
    scheduler, plan = tiny.scheduler(), Tree(roots=2, rounds=2).plan(make_task(size=6))
    requests, done = plan.start(), []
    while requests:
      samples = scheduler.generate_all(requests)
      requests = []
      for sample in reversed(samples) if backwards else samples:
        further, complete = plan.take(sample)
        requests += further
        done += complete
    found.append(sorted(done, key=lambda t: t.sample_index))
  for one, other in zip(*found, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    assert one.branch == other.branch


def test_new_weights_between_the_rounds_are_stamped(make_task, tiny):
  scheduler, plan = tiny.scheduler(), Tree(roots=2).plan(make_task())
  further, _ = zip(*(plan.take(s) for s in scheduler.generate_all(plan.start())), strict=True)
  scheduler.swap_params(tiny.params(1), 1)
  branches = [
    t
    for sample in scheduler.generate_all([r for requests in further for r in requests])
    for t in plan.take(sample)[1]
  ]
  for trajectory in branches:
    versions = trajectory.version_t[_PROMPT:]
    own = trajectory.branch.length - _PROMPT
    assert (versions[:own] == 0).all() and (versions[own:] == 1).all()
    assert trajectory.oldest_version == 0


def test_branches_of_a_point_share_its_prefill(make_task, tiny):
  """Twelve branches of one point: the prefix is computed once."""
  scheduler, plan = tiny.scheduler(), Tree(roots=1, per_point=12).plan(make_task(size=13))
  (further,) = (plan.take(sample)[0] for sample in scheduler.generate_all(plan.start()))
  before = scheduler.stats.prefill_tokens
  scheduler.generate_all(further)
  length = len(further[0].prompt_tokens)
  assert len({r.prompt_tokens.tobytes() for r in further}) == 1 and len(further) == 12
  assert scheduler.stats.prefill_tokens - before <= length


def test_samples_without_a_point_branch_at_the_prompt(make_task, tiny):
  task = make_task(max_tokens=1)
  plan = Tree(roots=2).plan(task)
  taken = [plan.take(s) for s in tiny.scheduler().generate_all(plan.start())]
  further = [r for requests, _ in taken for r in requests]
  assert [r.sampling.max_tokens for r in further] == [1, 1]
  for request in further:
    np.testing.assert_array_equal(request.prompt_tokens, task.prompt_tokens)
  # A sample that was cancelled offers no point either.
  plan = Tree(roots=1).plan(make_task(size=2))
  (sample,) = tiny.scheduler().generate_all(plan.start())
  (request,), _ = plan.take(dataclasses.replace(sample, finish_reason=FinishReason.ABORT))
  assert len(request.prompt_tokens) == _PROMPT


def test_candidates_are_a_samples_own_tokens(tiny, make_task):
  sample = tiny.scheduler().generate_all([tiny.request(3, 4, max_tokens=5)])[0]
  sample = dataclasses.replace(sample, tokens=np.array([14, 5, 7, 9, 21], np.int32))
  options = {'by': 'surprisal', 'separator': '\n', 'decode': make_task().tokenizer.decode}
  taken = np.array([7, 8], np.int32)
  found = candidates(sample, 4, taken, at='token', **options)
  assert [c.sample for c in found] == [4] * 4 and [c.depth for c in found] == [3, 4, 5, 6]
  np.testing.assert_allclose([c.score for c in found], -sample.raw_log_probs_t[1:])
  # Tokens 7, 14 and 21 end lines; after the last token there is nothing to draw anew.
  steps = candidates(sample, 4, taken, at='step', **options)
  assert steps == [found[0], found[2]]


def test_choosing_by_hand():
  found = [Candidate(0, i, score) for i, score in enumerate([1.0, 3.0, 2.0, 3.0, 0.5])]
  assert [c.depth for c in choose(found, 3, 'surprisal', (0,))] == [1, 3, 2]
  assert [c.depth for c in choose(found, 2, 'spread', (0,))] == [1, 3]
  assert [c.depth for c in choose(found, 9, 'spread', (0,))] == [0, 1, 2, 3, 4]
  assert choose([], 2, 'random', (0, 1)) == []


def test_steps_begin_after_runs_of_separators():
  def decode(ids):
    return ''.join('ab\n'[i] for i in ids)

  tokens = np.array([0, 2, 1, 2, 2, 2, 0, 1], np.int32)  # 'a\nb\n\n\nab'
  assert step_starts(tokens, '\n', decode) == (2, 6)
  assert step_starts(tokens, '\n\n', decode) == (5,)


def test_groups_that_are_no_trees_are_refused():
  assert not list(Tree(roots=2).problems(4))
  assert 'roots=3 must divide' in next(Tree(roots=3).problems(4))
  assert 'roots=4 must divide' in next(Tree(roots=4).problems(4))
  assert 'no branch for each of rounds=2' in next(Tree(roots=2, rounds=2).problems(4))
  mixed = Tree(roots=3, rounds=2, by='mixed')
  assert not list(mixed.problems(5)) and 'no branch for each of rounds=2' in next(mixed.problems(4))
  assert 'separator' in next(Tree(at='step', separator='').problems(4))
