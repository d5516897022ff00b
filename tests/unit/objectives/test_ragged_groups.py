"""Laws of every box on the host, over drawn ragged groups, so that a new one is covered on arrival.

Each law goes through all boxes of the tables at once: drawing and building a batch is most of the cost.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlax_stack.errors import ConfigError
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.objective import TABLES, resolve

_BOXES = [(slot, name) for slot in ('shaping', 'advantage') for name in TABLES[slot]]


def _objective(slot, name):
  critic = 'separate' if 'critic' in TABLES[slot][name].tags else 'none'
  boxes = {slot: (name,) if slot == 'shaping' else name}
  return resolve(**boxes, critic=critic, max_tokens=8)


_OBJECTIVES = {(slot, name): _objective(slot, name) for slot, name in _BOXES}
# Their baseline is one of places, so it depends on lengths where rewards are equal.
_BY_PLACE = ('step_leave_one_out',)
_SIZES = st.lists(st.integers(2, 6), min_size=1, max_size=4)
_DRAWN = settings(deadline=None, max_examples=25)


def _box(slot, name):
  return TABLES[slot][name]


def _draw(make_reward_batch, sizes, seed):
  """Ragged groups in which everything that a box may read differs from sample to sample."""
  rng = np.random.default_rng(seed)
  group = np.repeat(np.arange(len(sizes)), sizes)
  length = rng.integers(1, 7, group.size)
  turns = [np.sort(rng.integers(0, 2, n)) for n in length]
  turns = [t - t[0] for t in turns]
  batch = make_reward_batch(
    rng.integers(0, 5, group.size) / 4,
    group,
    length,
    truncated=rng.random(group.size) < 0.2,
    metadata=[{'task': f'task {g % 2}'} for g in group],
    turns=turns,
    roles=[[f'role {rng.integers(2)}' for _ in range(t[-1] + 1)] for t in turns],
    steps=[[(place, rng.integers(5) / 4) for place in range(0, n, 2)] for n in length],
    greedy=rng.integers(0, 5, len(sizes)) / 4,
  )
  scores = [tuple(-rng.exponential(1.0, n) for n in length) for _ in range(2)]
  return dataclasses.replace(batch, log_probs_t=scores[0], anchor_log_probs_t=scores[1])


def _taken(batch, order):
  """The trajectories of `order` alone, whose groups are numbered anew."""
  values = {}
  for field in dataclasses.fields(batch):
    value = getattr(batch, field.name)
    values[field.name] = (
      value[order] if isinstance(value, np.ndarray) else [value[i] for i in order]
    )
  first = list(dict.fromkeys(values['group'].tolist()))
  values['group'] = np.array([first.index(g) for g in values['group']])
  tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
  return dataclasses.replace(batch, **tuples)


def _found(key, batch):
  """What a box gives for each trajectory, as one array each."""
  objective = _OBJECTIVES[key]
  if key[0] == 'advantage':
    return list(advantages_of(objective, batch).adv_t)
  shaped = objective.shaping[0](batch)
  rows = zip(shaped.reward, shaped.keep, shaped.steps, strict=True)
  return [np.concatenate([[reward, keep], steps.reward]) for reward, keep, steps in rows]


def _assert_same(got, want, key):
  for some, other in zip(got, want, strict=True):
    np.testing.assert_allclose(some, other, rtol=1e-5, atol=1e-6, err_msg=str(key))


@_DRAWN
@given(_SIZES, st.integers(0, 2**16))
def test_values_are_finite_and_one_per_trained_token(make_reward_batch, sizes, seed):
  batch = _draw(make_reward_batch, sizes, seed)
  for key in _BOXES:
    found = advantages_of(_OBJECTIVES[key], batch)
    assert [len(values) for values in found.adv_t] == batch.length.tolist(), key
    assert all(v.dtype == np.float32 and np.isfinite(v).all() for v in found.adv_t), key
    assert np.isfinite(found.reward).all() and found.keep.any(), key


@_DRAWN
@given(st.data(), _SIZES, st.integers(0, 2**16))
def test_order_of_groups_and_within_them_does_not_matter(make_reward_batch, data, sizes, seed):
  batch = _draw(make_reward_batch, sizes, seed)
  groups = data.draw(st.permutations(range(len(sizes))))
  members = [np.flatnonzero(batch.group == g).tolist() for g in groups]
  order = np.concatenate([data.draw(st.permutations(member)) for member in members])
  shuffled = _taken(batch, order)
  for key in _BOXES:
    if _box(*key).host_state is None:  # one with a state takes trajectories in their order
      want = _found(key, batch)
      _assert_same(_found(key, shuffled), [want[i] for i in order], key)


@_DRAWN
@given(_SIZES, st.integers(0, 2**16))
def test_a_group_does_not_depend_on_others_unless_the_box_says_so(make_reward_batch, sizes, seed):
  batch = _draw(make_reward_batch, sizes, seed)
  member = np.flatnonzero(batch.group == len(sizes) - 1)
  alone = _taken(batch, member)
  for key in _BOXES:
    if 'batch' not in _box(*key).tags:
      want = _found(key, batch)
      _assert_same(_found(key, alone), [want[i] for i in member], key)


@_DRAWN
@given(_SIZES, st.integers(0, 2**16))
def test_a_group_of_equal_rewards_says_nothing(make_reward_batch, sizes, seed):
  batch = _draw(make_reward_batch, sizes, seed)
  plain = make_reward_batch(np.ones(batch.reward.size), batch.group, batch.length)
  for key in _BOXES:
    if key[0] == 'advantage' and 'group' in _box(*key).tags and key[1] not in _BY_PLACE:
      assert not any(values.any() for values in _found(key, plain)), key


@settings(deadline=None, max_examples=10)
@given(_SIZES, st.integers(0, 4))
def test_a_group_of_one_among_others_is_refused(make_reward_batch, sizes, place):
  sizes = [*sizes[:place], 1, *sizes[place:]]
  batch = _draw(make_reward_batch, sizes, place)
  for key in _BOXES:
    if key[0] == 'advantage' and 'group' in _box(*key).tags:
      with pytest.raises(ConfigError, match='at least 2 samples per group, got 1'):
        advantages_of(_OBJECTIVES[key], batch)


def test_laws_reach_the_boxes_they_are_about():
  tags = {name: TABLES['advantage'][name].tags for name in TABLES['advantage']}
  assert {'group_center', 'prefix_tree', 'step_std'} <= {n for n, t in tags.items() if 'group' in t}
  assert {'batch_whiten', 'role_baseline'} == {n for n, t in tags.items() if t == {'batch'}}


_OF_BATCH = [(slot, name) for slot, name in _BOXES if 'batch' in _box(slot, name).tags]


@pytest.mark.parametrize('key', _OF_BATCH, ids=str)
def test_a_box_of_the_batch_does_depend_on_other_groups(key, make_reward_batch):
  """Three groups, of which the first is of the last one's task and the second is of equal rewards."""
  batch = _draw(make_reward_batch, [3, 3, 3], 1)
  batch = dataclasses.replace(batch, reward=np.array([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 3.0]))
  last = np.arange(6, 9)
  want, alone = _found(key, batch), _found(key, _taken(batch, last))
  assert any(np.abs(a - want[i]).max() > 1e-4 for a, i in zip(alone, last, strict=True))
