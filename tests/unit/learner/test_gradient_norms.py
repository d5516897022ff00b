"""Gradient norms of single trajectories against gradients of each alone, and the baseline they make."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner.gradient_norms import squared_gradient_norms
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings, target_log_probs
from rlax_stack.objectives.advantages.minimum_variance import weighed_baseline
from rlax_stack.objectives.loss import loss_inputs
from rlax_stack.objectives.objective import resolve

_PLAN = RowPlan(shape=RowShape(48, 48), micro_batch_rows=1, max_micro_batches=4)


def _alone(learner, config, groups):
  """The squared norm of each trajectory's gradient, one trajectory to a batch."""
  norms = []
  for group in groups:
    for trajectory in group.trajectories:
      one = dataclasses.replace(group, trajectories=(trajectory,))
      packed = learner._pack([one], [np.zeros(1, np.float32)])
      rows = jax.tree.map(jnp.asarray, packed)

      def total(params, rows=rows):
        return jnp.sum(target_log_probs(params, config, rows, ForwardSettings()).log_prob)

      gradient = jax.grad(total)(learner.params)
      norms.append(
        sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(gradient))
      )
  return np.array(norms)


@pytest.mark.parametrize('mesh', [{}, {'data': 2, 'tensor': 2}], ids=str)
def test_norms_are_those_of_separate_gradients(mesh, tiny, make_learner, make_groups):
  groups = make_groups(sizes=(3, 2), prompt_lengths=(5, 3))
  plan = dataclasses.replace(_PLAN, micro_batch_rows=2) if mesh else _PLAN
  learner = make_learner(rows=plan, mesh=mesh)
  batch, num_micro = learner._place(learner._pack_to_train(groups)[0])
  norms = jax.jit(
    lambda p: squared_gradient_norms(p, tiny, batch, num_micro, ForwardSettings(), learner._mesh)
  )(learner.params)
  want = _alone(make_learner(rows=_PLAN), tiny, groups)
  mask, ids = np.asarray(batch.mask_t), np.asarray(batch.trajectory_t)
  np.testing.assert_allclose(np.asarray(norms)[mask], want[ids[mask]], rtol=2e-4)
  assert not np.asarray(norms)[~mask].any() and want.max() > 1.5 * want.min()


@pytest.mark.parametrize('by_std', [True, False])
def test_baseline_is_the_weighed_mean(by_std, tiny, make_learner, make_groups):
  groups = make_groups(sizes=(3, 2), prompt_lengths=(5, 3))
  learner = make_learner(rows=_PLAN)
  scores, rng = learner.score(groups), np.random.default_rng(0)
  groups = [
    dataclasses.replace(
      group,
      trajectories=tuple(
        dataclasses.replace(
          t, behaviour_log_probs_t=(s + 0.2 * rng.standard_normal(s.shape)).astype(np.float32)
        )
        for t, s in zip(group.trajectories, of_group, strict=True)
      ),
    )
    for group, of_group in zip(groups, scores, strict=True)
  ]
  batch, num_micro = learner._place(learner._pack_to_train(groups)[0])
  norms = squared_gradient_norms(learner.params, tiny, batch, num_micro, ForwardSettings())
  log_probs = learner._score(learner.params, batch, num_micro)
  scored = type('Scored', (), {'log_prob': log_probs, 'entropy': log_probs, 'vocabulary': {}})
  inputs = loss_inputs(batch, scored, version=jnp.int32(0), score_proximal=False)
  got = np.asarray(weighed_baseline(inputs, gradient_norms=norms, by_std=by_std))
  alone, first = _alone(learner, tiny, groups), 0
  mask, ids = np.asarray(batch.mask_t), np.asarray(batch.trajectory_t)
  for group, of_group in zip(groups, scores, strict=True):
    members = np.arange(first, first + len(group.trajectories))
    first += len(members)
    reward = np.array([t.reward.value for t in group.trajectories])
    ratio = np.array(
      [
        np.exp((s - t.behaviour_log_probs_t)[t.mask_t].sum())
        for t, s in zip(group.trajectories, of_group, strict=True)
      ]
    )
    weight = ratio**2 * alone[members]
    want = reward - (weight * reward).sum() / weight.sum()
    want = want / reward.std() if by_std else want
    for member, value in zip(members, want, strict=True):
      np.testing.assert_allclose(got[mask & (ids == member)], value, rtol=2e-3, atol=1e-4)


def test_step_uses_the_norms(make_learner, make_groups):
  """Where all rewards of a group are alike nothing is learned; else the update is of the baseline."""
  groups = make_groups(sizes=(3, 2), prompt_lengths=(5, 3))
  objective = resolve(advantage='minimum_variance', trust_region='reinforce', corrections=())
  assert objective.needs_gradient_norms and not resolve().needs_gradient_norms
  moved = make_learner(objective=objective, rows=_PLAN).train(groups).result()
  plain = resolve(advantage='group_std(ddof=0, eps=0)', trust_region='reinforce', corrections=())
  other = make_learner(objective=plain, rows=_PLAN).train(groups).result()
  assert moved['grad_norm'] > 0 and abs(moved['loss'] - other['loss']) > 1e-3
  alike = [
    dataclasses.replace(
      g,
      trajectories=tuple(
        dataclasses.replace(t, reward=g.trajectories[0].reward) for t in g.trajectories
      ),
    )
    for g in groups
  ]
  assert make_learner(objective=objective, rows=_PLAN).train(alike).result()['grad_norm'] == 0.0
