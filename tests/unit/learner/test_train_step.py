"""The numerics contract of the train step, on a tiny decoder and eight virtual devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner import packing
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings
from rlax_stack.objectives.objective import resolve

_CORRECTED = resolve(corrections=('token_tis(absolute_high=2)',))


def _update(learner, groups):
  """Metrics, and the first Adam moment: the gradient times 1 − b1 after one step."""
  metrics = learner.train(groups).result()
  moments = [x for x in jax.tree.leaves(learner.state.opt_state) if x.ndim]
  return metrics, [np.asarray(x) for x in moments[: len(moments) // 2]]


def _assert_same_update(got, want, rtol=2e-5):
  for name in ('loss', 'grad_norm', 'entropy', 'trained_tokens', 'kl_behaviour'):
    np.testing.assert_allclose(got[0][name], want[0][name], rtol=rtol, atol=1e-7, err_msg=name)
  for a, b in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5 * np.abs(b).max() + 1e-9)


@pytest.fixture(scope='module')
def groups(make_groups):
  return make_groups()


@pytest.fixture(scope='module')
def want(make_learner, groups):
  return _update(make_learner(), groups)


_PLANS = {
  'one row at a time': RowPlan(shape=RowShape(48, 48), micro_batch_rows=1, max_micro_batches=9),
  'longer bucket': RowPlan(shape=RowShape(96, 80), micro_batch_rows=2, max_micro_batches=1),
  'short rows, groups split': RowPlan(
    shape=RowShape(20, 14), micro_batch_rows=2, max_micro_batches=4
  ),
}


@pytest.mark.parametrize('name', sorted(_PLANS))
def test_update_does_not_depend_on_rows_and_micro_batches(name, make_learner, groups, want):
  _assert_same_update(_update(make_learner(rows=_PLANS[name]), groups), want)


@pytest.mark.parametrize('mesh', [{'data': 4}, {'data': 2, 'fsdp': 2, 'tensor': 2}], ids=str)
def test_update_does_not_depend_on_the_mesh(mesh, make_learner, groups, want):
  got = _update(make_learner(mesh=mesh), groups)
  _assert_same_update(got, want)


def test_sequence_mean_does_not_depend_on_micro_batches(make_learner, groups, want):
  mean = resolve(aggregation='sequence_mean', corrections=())
  whole = _update(make_learner(objective=mean), groups)
  _assert_same_update(
    _update(make_learner(objective=mean, rows=_PLANS['one row at a time']), groups), whole
  )
  assert abs(whole[0]['grad_norm'] / want[0]['grad_norm'] - 1) > 1e-3


def test_packed_equals_separate_sequences(make_learner, groups, want, monkeypatch):
  monkeypatch.setattr(packing, 'pack_groups', packing.pack_separate)
  plan = RowPlan(shape=RowShape(16, 8), micro_batch_rows=3, max_micro_batches=3)
  _assert_same_update(_update(make_learner(rows=plan), groups), want)


@pytest.mark.parametrize('order', [[2, 0, 1], [1, 2, 0]])
def test_update_does_not_depend_on_the_order_of_groups(order, make_learner, groups, want):
  _assert_same_update(_update(make_learner(), [groups[i] for i in order]), want)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_ratio_is_exactly_one_on_policy(dtype, make_learner, groups):
  learner = make_learner(forward=ForwardSettings(compute_dtype=dtype))
  metrics = learner.train(groups).result()
  assert metrics['ratio_mean'] == 1.0
  assert metrics['ratio_max'] == 1.0
  assert metrics['clip_low_fraction'] == metrics['clip_high_fraction'] == 0.0
  # With ratio 1 the loss is minus the mean advantage over tokens.
  adv = np.concatenate(
    [
      np.full(t.mask_t.sum(), t.reward.value - np.mean([u.reward.value for u in g.trajectories]))
      for g in groups
      for t in g.trajectories
    ]
  )
  assert metrics['loss'] == pytest.approx(-adv.mean(), rel=1e-5)
  assert metrics['trained_tokens'] == adv.size


def test_bfloat16_gradient_is_near_float32(make_learner, groups, want):
  learner = make_learner(forward=ForwardSettings(compute_dtype=jnp.bfloat16))
  metrics, _ = _update(learner, groups)
  assert metrics['grad_norm'] == pytest.approx(want[0]['grad_norm'], rel=2e-2)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(learner.params))


def test_several_updates_move_the_ratio(make_learner, groups):
  learner = make_learner(updates_per_batch=2)
  metrics = learner.train(groups).result()
  assert metrics['ratio_max'] > 1.0
  assert int(learner.state.step) == 2 and learner.version == int(learner.state.version) == 1


def test_scores_are_the_log_probs_of_the_train_step(make_learner, groups):
  learner = make_learner()
  scores = learner.score(groups)
  for group, of_group in zip(groups, scores, strict=True):
    for trajectory, log_probs in zip(group.trajectories, of_group, strict=True):
      assert log_probs.shape == trajectory.tokens.shape
      assert (log_probs[trajectory.mask_t] < 0).all() and (log_probs[~trajectory.mask_t] == 0).all()
  as_sampled = [
    dataclasses.replace(
      group,
      trajectories=tuple(
        dataclasses.replace(t, behaviour_log_probs_t=s)
        for t, s in zip(group.trajectories, of_group, strict=True)
      ),
    )
    for group, of_group in zip(groups, scores, strict=True)
  ]
  assert learner.train(as_sampled).result()['behaviour_log_prob_gap'] < 1e-6


def _poison(batch):
  """NaN, or out of range, wherever the mask says nothing is read."""
  mask = batch.mask_t
  names = (
    'adv_t',
    'reward_t',
    'behaviour_log_probs_t',
    'proximal_log_probs_t',
    'anchor_log_probs_t',
  )
  changed = {name: np.where(mask, getattr(batch, name), np.float32('nan')) for name in names}
  return batch._replace(
    **changed,
    target_t=np.where(mask, batch.target_t, 7).astype(np.int32),
    source_index_t=np.where(mask, batch.source_index_t, 3).astype(np.int32),
    version_t=np.where(mask, batch.version_t, -99).astype(np.int32),
  )


def test_masked_places_may_hold_nan(make_learner, groups, want, monkeypatch):
  pack = packing.pack_groups
  monkeypatch.setattr(packing, 'pack_groups', lambda *a, **k: _poison(pack(*a, **k)))
  corrected = _update(make_learner(objective=_CORRECTED), groups)
  monkeypatch.setattr(packing, 'pack_groups', pack)
  clean = _update(make_learner(objective=_CORRECTED), groups)
  assert corrected[0] == clean[0]
  for a, b in zip(corrected[1], clean[1], strict=True):
    np.testing.assert_array_equal(a, b)


def test_kl_to_the_anchor_is_zero_at_the_anchor_and_grows(make_learner, groups):
  learner = make_learner(objective=resolve(regularisers=('kl_anchor(coef=0.1)',)))
  first = learner.train(groups).result()
  second = learner.train(groups).result()
  assert first['kl_anchor'] == pytest.approx(0.0, abs=1e-10)
  assert second['kl_anchor'] > 1e-6


def test_non_finite_update_is_skipped_and_counted(make_learner, groups, tiny_params):
  learner = make_learner()
  before = jax.device_get(learner.state)
  bad = [_with_log_prob(groups[0], float('nan')), *groups[1:]]
  with_correction = make_learner(objective=_CORRECTED)
  metrics = with_correction.train(bad).result()
  state = jax.device_get(with_correction.state)
  assert metrics['skipped'] == metrics['skipped_in_row'] == 1.0
  for a, b in zip(
    jax.tree.leaves((state.params, state.opt_state)),
    jax.tree.leaves((before.params, before.opt_state)),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)
  assert (int(state.step), int(state.version)) == (1, 1)
  metrics = with_correction.train(groups).result()
  assert (metrics['skipped'], metrics['skipped_in_row']) == (1.0, 0.0)
  # The schedule and the moments count applied updates only.
  clean = make_learner(objective=_CORRECTED)
  clean.train(groups).result()
  for a, b in zip(
    jax.tree.leaves(clean.params), jax.tree.leaves(with_correction.params), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def _with_log_prob(group, value):
  trajectory = group.trajectories[0]
  log_probs = trajectory.behaviour_log_probs_t.copy()
  log_probs[-1] = value
  changed = dataclasses.replace(trajectory, behaviour_log_probs_t=log_probs)
  return dataclasses.replace(group, trajectories=(changed, *group.trajectories[1:]))
