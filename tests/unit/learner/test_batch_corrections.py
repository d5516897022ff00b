"""Corrections that see the whole batch give one update on any mesh; a step scale acts as a rate."""

import dataclasses

import jax
import numpy as np
import pytest

from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.objectives.objective import resolve

_ONE_ROW = RowPlan(shape=RowShape(48, 48), micro_batch_rows=1, max_micro_batches=9)
_NAMES = ('loss', 'grad_norm', 'kept_fraction', 'correction_mean', 'ess_fraction')


@pytest.fixture(scope='module')
def groups(make_learner, make_groups):
  """Groups sampled by a policy near that of the learner, but not the same."""
  groups, rng = make_groups(), np.random.default_rng(1)
  return [
    dataclasses.replace(
      group,
      trajectories=tuple(
        dataclasses.replace(
          t, behaviour_log_probs_t=(s + 0.3 * rng.standard_normal(s.shape)).astype(np.float32)
        )
        for t, s in zip(group.trajectories, scores, strict=True)
      ),
    )
    for group, scores in zip(groups, make_learner().score(groups), strict=True)
  ]


@pytest.mark.parametrize(
  'text',
  [
    'second_moment_mask(absolute_high=0.04)',
    'self_normalised_tis(absolute_high=1.2, level="sequence")',
    'ess_step',
  ],
)
def test_update_does_not_depend_on_the_mesh_or_the_rows(text, make_learner, groups):
  objective = resolve(trust_region='none', corrections=(text,))
  found = [
    make_learner(objective=objective, **extra).train(groups).result()
    for extra in ({'rows': _ONE_ROW}, {'mesh': {'data': 4}})
  ]
  for name in (*_NAMES, *(['step_scale'] if text == 'ess_step' else [])):
    np.testing.assert_allclose(found[1][name], found[0][name], rtol=2e-5, err_msg=name)
  if 'mask' in text:
    assert 0 < found[0]['kept_fraction'] < 1


def test_step_scale_is_a_factor_of_the_update(make_learner, groups):
  learners = [
    make_learner(objective=resolve(trust_region='none', corrections=corrections))
    for corrections in ((), ('ess_step',))
  ]
  before = learners[0].snapshot()
  plain, scaled = [learner.train(groups).result() for learner in learners]
  scale = scaled['step_scale']
  assert 0.1 < scale < 0.99 and 'step_scale' not in plain
  assert scaled['grad_norm'] == pytest.approx(plain['grad_norm'], rel=1e-6)
  whole, part = [
    np.concatenate(
      [
        (np.asarray(a) - np.asarray(b)).ravel()
        for a, b in zip(jax.tree.leaves(learner.params), jax.tree.leaves(before), strict=True)
      ]
    )
    for learner in learners
  ]
  assert np.abs(whole).max() > 0
  np.testing.assert_allclose(part, scale * whole, atol=2e-3 * np.abs(whole).max())
