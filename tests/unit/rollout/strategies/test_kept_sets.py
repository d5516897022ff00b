"""Trajectories of every strategy carry the sets their tokens were drawn from."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.strategies.delethink import Delethink
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.prefix import Prefix
from rlax_stack.rollout.strategies.tree import Tree
from rlax_stack.types import KEPT_OVERFLOW, Source

_PROMPT, _ROOM = 6, 5


@pytest.fixture(scope='module')
def recording(tiny):
  sizes = dataclasses.replace(tiny.SIZES, kept_tokens=_ROOM)
  engine = Engine(tiny.MODEL, sizes)
  return tiny.scheduler(of=lambda: engine)


def _contexts(trajectory):
  """The tokens that each token saw, itself not among them."""
  starts = (_PROMPT, *trajectory.context_starts)
  for place in range(_PROMPT, len(trajectory.tokens)):
    start = max(s for s in starts if s <= place)
    yield place, [*trajectory.tokens[:_PROMPT], *trajectory.tokens[start:place]]


@pytest.mark.parametrize(
  'strategy',
  [
    Independent(),
    Tree(roots=2, rounds=2),
    Prefix(guided=0.5, field='solution'),
    Delethink(chunk=5, carry=2),
  ],
  ids=lambda strategy: type(strategy).__name__,
)
def test_every_sampled_token_has_its_set(strategy, make_task, draw, tiny, recording):
  task = make_task(top_p=0.1, metadata={'solution': '50 51 52 53'})
  seen = {'set': 0, 'overflow': 0, 'none': 0}
  for trajectory in draw(strategy, task, recording):
    assert trajectory.kept_ids_t.shape == (len(trajectory.tokens), _ROOM)
    assert (trajectory.kept_ids_t[:_PROMPT] == -1).all()
    for place, context in _contexts(trajectory):
      ids = [i for i in trajectory.kept_ids_t[place].tolist() if i != -1]
      if trajectory.source_t[place] != Source.POLICY:
        assert not ids and not trajectory.mask_t[place]
        seen['none'] += 1
        continue
      log_probs = tiny.log_softmax(tiny.full_logits(np.array(context, np.int32)))[-1]
      order = np.argsort(-log_probs)
      size = int((np.cumsum(np.exp(log_probs[order])) < 0.1).sum()) + 1
      assert ids == (order[:size].tolist() if size <= _ROOM else [KEPT_OVERFLOW])
      assert trajectory.mask_t[place] == (size <= _ROOM)
      seen['set' if size <= _ROOM else 'overflow'] += 1
  assert seen['set'] > 5 and seen['overflow'] > 0
  assert (seen['none'] > 0) == isinstance(strategy, Prefix | Delethink)
