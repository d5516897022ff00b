"""The learner from outside: lazy metrics, resume bit for bit, one program, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError, DataError, NonFiniteError, RewardError
from rlax_stack.learner import packing
from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.types import Reward


def _equal(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_killed_and_resumed_is_bit_for_bit_the_same(tmp_path, make_learner, make_groups):
  batches = [make_groups(seed=seed) for seed in range(4)]
  whole = make_learner()
  for batch in batches:
    whole.train(batch)

  first = make_learner()
  checkpointer = Checkpointer(tmp_path)
  for batch in batches[:2]:
    first.train(batch)
  checkpointer.save(first.version, first.state, {'next': 2})
  first.train(batches[3])  # lost with the process
  checkpointer.close()

  second = make_learner()
  checkpointer = Checkpointer(tmp_path)
  restored = checkpointer.restore_latest(second.abstract_state())
  checkpointer.close()
  second.restore(restored.state)
  assert second.version == restored.step == 2
  for batch in batches[restored.extras['next'] :]:
    second.train(batch)
  _equal(second.state, whole.state)
  assert second.version == whole.version == 4


def test_a_batch_prepared_ahead_changes_no_value(make_learner, make_groups, monkeypatch):
  batches = [make_groups(seed=seed) for seed in range(3)]
  plain, ahead = make_learner(), make_learner()
  packed = []
  pack = packing.pack_groups
  monkeypatch.setattr(
    packing,
    'pack_groups',
    lambda groups, *args, **kwargs: packed.append(groups[0]) or pack(groups, *args, **kwargs),
  )
  ahead.train(batches[0])
  assert ahead.prepare(batches[1])
  assert ahead._prepared.is_of(batches[1], ahead.host_state)
  assert not ahead._prepared.is_of(make_groups(seed=1), ahead.host_state)  # alike, not the same
  packed.clear()
  metrics = ahead.train(batches[1]).result()
  assert not packed and metrics.pop('prepared_ahead') == 1.0
  ahead.prepare(batches[1])
  packed.clear()
  ahead.train(batches[2])
  assert packed == [batches[2][0]]  # another batch came
  for batch in batches:
    step = plain.train(batch)
    if batch is batches[1]:
      want = step.result()
      assert want.pop('prepared_ahead') == 0.0 and want == metrics
  _equal(ahead.state, plain.state)
  assert step.is_ready() or step.result()


def test_one_program_serves_every_batch(make_learner, make_groups, settings):
  # Equal settings share their programs, so these are like those of no other test.
  learner = make_learner(optimizer=dataclasses.replace(settings.optimizer, eps=1.25e-8))
  shapes = [((3, 2, 4), (5, 3, 8)), ((2,), (1,)), ((5, 5, 5, 5), (9, 9, 9, 9))]
  for sizes, prompt_lengths in shapes:
    learner.train(make_groups(sizes=sizes, prompt_lengths=prompt_lengths)).result()
  assert learner._step._cache_size() == 1


def test_more_rows_than_planned_still_train(make_learner, make_groups):
  groups = make_groups()
  plan = RowPlan(shape=RowShape(20, 14), micro_batch_rows=4, max_micro_batches=1)
  metrics = make_learner(rows=plan).train(groups).result()
  assert metrics['trained_tokens'] == sum(t.mask_t.sum() for g in groups for t in g.trajectories)


def test_snapshot_outlives_the_step_and_has_its_dtype(make_learner, make_groups, tiny_params):
  learner = make_learner()
  snapshot, half = learner.snapshot(), learner.snapshot(jnp.bfloat16)
  learner.train(make_groups()).result()
  _equal(snapshot, tiny_params)
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(half))
  changed = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), learner.params, tiny_params)
  assert all(jax.tree.leaves(changed))


def test_metrics_are_floats_and_say_what_was_packed(make_learner, make_groups):
  groups = make_groups()
  metrics = make_learner().train(groups).result()
  assert all(isinstance(value, float) for value in metrics.values())
  tokens = sum(t.mask_t.sum() for g in groups for t in g.trajectories)
  assert metrics['targets'] == metrics['trained_tokens'] == tokens
  assert metrics['learning_rate'] == pytest.approx(1e-2)
  assert {'loss', 'grad_norm', 'entropy', 'ratio_max', 'kl_behaviour', 'skipped'} <= set(metrics)


def _with_reward(group, reward):
  trajectory = dataclasses.replace(group.trajectories[0], reward=reward)
  return dataclasses.replace(group, trajectories=(trajectory, *group.trajectories[1:]))


def test_too_many_non_finite_updates_stop_the_run(make_learner, make_groups, tiny_params):
  params = jax.tree.map(np.copy, tiny_params)
  params['final_norm']['scale'][0] = np.nan
  learner = make_learner(params=params, max_skipped_in_row=2)
  groups = make_groups()
  learner.train(groups)
  assert learner.train(groups).result()['skipped_in_row'] == 2.0
  with pytest.raises(NonFiniteError, match='2 updates in a row .* the limit is 2'):
    learner.train(groups)
  with pytest.raises(NonFiniteError):
    learner.check_finite()


def test_groups_that_cannot_be_trained_on(make_learner, make_groups):
  learner = make_learner()
  group = make_groups()[0]
  with pytest.raises(DataError, match='group 0 has a trajectory without a reward'):
    learner.train([_with_reward(group, None)])
  with pytest.raises(DataError, match='without a reward'):
    learner.train([_with_reward(group, Reward(value=None, failure='deadline'))])
  with pytest.raises(RewardError, match='finite'):
    learner.train([_with_reward(group, Reward(value=float('nan')))])
  with pytest.raises(ConfigError, match='at least 2 samples'):
    learner.train([dataclasses.replace(group, trajectories=group.trajectories[:1])])
  assert learner.version == 0
