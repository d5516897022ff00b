"""Samples behind another prompt: their places, their scores, and what cannot be moved."""

import dataclasses

import jax
import numpy as np
import pytest

from rlax_stack.errors import ConfigError, DataError
from rlax_stack.learner.other_context import OtherContext, behind, places
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.teacher import Teacher
from rlax_stack.objectives.objective import resolve

ASKING = resolve(
  advantage='teacher', trust_region='none', corrections=(), regularisers=('kl_teacher(coef=0.0)',)
)
PLAN = RowPlan(shape=RowShape(64, 48), micro_batch_rows=8, max_micro_batches=1)


def _other_prompt(group):
  """Longer than the group's own by a number of its own."""
  return np.arange(len(group.prompt_tokens) + 3 + group.group_id, dtype=np.int32) * 5 % 64


CONTEXT = OtherContext(_other_prompt, PLAN)


def _scores_after_the_other_prompt(learner, groups):
  """Without `rows_of`: by a learner whose batch has the other prompts themselves."""
  moved = [behind(group, _other_prompt(group)) for group in groups]
  return [
    s[t.mask_t]
    for group, scores in zip(moved, learner.score(moved), strict=True)
    for t, s in zip(group.trajectories, scores, strict=True)
  ]


@pytest.mark.parametrize('mesh', [{}, {'data': 2, 'fsdp': 2}], ids=str)
@pytest.mark.parametrize('taught', [False, True], ids=['self', 'teacher'])
def test_scores_are_those_after_the_other_prompt(
  mesh, taught, make_learner, make_groups, tiny, tiny_params
):
  groups = make_groups()
  stronger = jax.tree.map(lambda x: 1.2 * x, tiny_params) if taught else tiny_params
  learner = make_learner(
    mesh=mesh,
    objective=ASKING,
    other_context=CONTEXT,
    teacher=Teacher(tiny, stronger) if taught else None,
  )
  want = _scores_after_the_other_prompt(make_learner(params=stronger, rows=PLAN), groups)
  prepared = learner._prepare(groups)
  got = np.asarray(learner._taught(prepared)).reshape(-1)
  where = np.asarray(prepared.batch.trajectory_t).reshape(-1)
  for index, scores in enumerate(want):
    np.testing.assert_allclose(got[where == index], scores, atol=1e-5, rtol=1e-5)
  assert not got[where < 0].any()
  own = np.asarray(learner._score(learner.params, prepared.batch, prepared.num_micro)).reshape(-1)
  assert np.abs(own - got)[where >= 0].max() > 0.1
  metrics = learner.train(groups).result()
  assert metrics['skipped'] == 0 and metrics['kl_teacher'] > 0.0


def test_places_follow_the_tokens_however_rows_are_packed(make_learner, make_groups):
  groups = make_groups()
  packed, _ = make_learner()._pack_to_train(groups)
  moved = [behind(group, _other_prompt(group)) for group in groups]
  other, _ = make_learner(rows=PLAN)._pack_to_train(moved)
  found = places(packed, other)
  trained = packed.mask_t
  assert (found[~trained] == -1).all() and len(set(found[trained])) == trained.sum()
  np.testing.assert_array_equal(
    other.target_t.reshape(-1)[found[trained]], packed.target_t[trained]
  )
  same = other.trajectory_t.reshape(-1)[found[trained]]
  np.testing.assert_array_equal(same, packed.trajectory_t[trained])


def test_a_moved_sample_keeps_all_but_its_prompt(make_groups):
  group = make_groups()[0]
  count, prompt = len(group.prompt_tokens), _other_prompt(group)
  moved = behind(group, prompt)
  for before, after in zip(group.trajectories, moved.trajectories, strict=True):
    np.testing.assert_array_equal(after.tokens, [*prompt, *before.tokens[count:]])
    for name in ('mask_t', 'source_t', 'behaviour_log_probs_t', 'version_t'):
      np.testing.assert_array_equal(
        getattr(after, name)[len(prompt) :], getattr(before, name)[count:]
      )
    assert not after.mask_t[: len(prompt)].any() and after.reward is before.reward


def test_what_cannot_be_moved_is_refused(make_groups, make_learner):
  group = make_groups()[0]
  parts = tuple(dataclasses.replace(t, context_starts=(4,)) for t in group.trajectories)
  with pytest.raises(DataError, match='went on without a part of its context'):
    behind(dataclasses.replace(group, trajectories=parts), _other_prompt(group))
  with pytest.raises(ConfigError, match='Set config.learner.teacher'):
    make_learner(objective=ASKING)


def test_places_of_twins_and_of_samples_that_train_nothing(make_learner, make_groups):
  groups = make_groups()
  first, *others = groups[0].trajectories
  twin = dataclasses.replace(first, sample_index=others[0].sample_index)
  groups = [dataclasses.replace(groups[0], trajectories=(first, twin, *others[1:])), *groups[1:]]
  moved = [behind(group, _other_prompt(group)) for group in groups]
  other, _ = make_learner(rows=PLAN)._pack_to_train(moved)
  silent = dataclasses.replace(others[-1], mask_t=np.zeros_like(others[-1].mask_t))
  kept = (*groups[0].trajectories[:-1], silent)
  groups[0] = dataclasses.replace(groups[0], trajectories=kept)
  packed, _ = make_learner()._pack_to_train(groups)
  found, theirs = places(packed, other).reshape(-1), other.trajectory_t.reshape(-1)
  count = {}
  for place, index in zip(found, packed.trajectory_t.reshape(-1), strict=True):
    nth = count[index] = count.get(index, -1) + 1
    assert place == (-1 if index < 0 else np.flatnonzero(theirs == index)[nth])


def test_a_restored_policy_teaches_itself_the_same(make_learner, make_groups):
  groups = make_groups()
  learner, again = (make_learner(objective=ASKING, other_context=CONTEXT) for _ in range(2))
  learner.train(groups).result()
  saved = jax.tree.map(np.asarray, jax.device_get(learner.state))
  where = jax.tree.map(lambda leaf: leaf.sharding, again.state)
  again.restore(jax.device_put(saved, where), learner.host_state)
  for each in (learner, again):
    each.train(groups).result()
  for one, two in zip(jax.tree.leaves(learner.params), jax.tree.leaves(again.params), strict=True):
    np.testing.assert_array_equal(one, two)
