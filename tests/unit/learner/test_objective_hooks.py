"""What a box may ask of the learner: whole-batch scores, state in checkpoints, scores on the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings, score_batch
from rlax_stack.objectives.boxes import BoundBox, Box
from rlax_stack.objectives.inputs import Statistics
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.trust_regions.clip import none

_PLAN = RowPlan(shape=RowShape(48, 48), micro_batch_rows=1, max_micro_batches=4)


def _statistics(inputs, *, state):
  total = jnp.sum(jnp.where(inputs.mask_t, inputs.log_probs_t + inputs.entropy_t, 0.0))
  return Statistics(tokens={'log_probs_t': inputs.log_probs_t}, scalars={'total': total + state})


def _region(ratio, inputs, *, statistics, state):
  plain = none(ratio, inputs)
  seen = statistics.tokens['log_probs_t'] - inputs.log_probs_t
  whole = jnp.broadcast_to(statistics.scalars['total'] - state, seen.shape)
  stale = inputs.staleness_t.astype(jnp.float32)
  return plain._replace(metrics={'seen': jnp.abs(seen), 'whole': whole, 'stale': stale})


def _update(state, found, *, rate: float = 0.5):
  return state + rate * found['ratio_mean']


@pytest.fixture(scope='module')
def probing():
  box = Box(
    _region,
    formula='probe',
    batch_statistics=_statistics,
    init_state=lambda: jnp.float32(1.0),
    update_state=_update,
  )
  bound = BoundBox('probe', box, (('rate', 0.5),))
  return dataclasses.replace(resolve(), trust_region=bound)


@pytest.mark.parametrize('mesh', [{}, {'data': 2, 'fsdp': 2}], ids=str)
def test_statistics_see_the_whole_batch_under_the_current_weights(
  mesh, probing, make_learner, make_groups
):
  groups = make_groups()
  plan = dataclasses.replace(_PLAN, micro_batch_rows=4) if mesh else _PLAN
  learner = make_learner(mesh=mesh, objective=probing, rows=plan)
  scores = sum(float(s.sum()) for of_group in learner.score(groups) for s in of_group)
  found = learner.train(groups).result()
  assert found['seen'] < 1e-6
  entropy = found['entropy'] * found['trained_tokens']
  assert found['whole'] == pytest.approx(scores + entropy, rel=1e-4)
  assert found['stale'] == 0.0 and learner.train(groups).result()['stale'] == 1.0


def test_state_moves_with_updates_and_comes_back_from_a_checkpoint(
  tmp_path, probing, make_learner, make_groups
):
  groups, learner = make_groups(), make_learner(objective=probing)
  assert make_learner().state.objective == {}
  learner.train(groups).result()
  assert float(learner.state.objective['trust_region']) == pytest.approx(1.5)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, learner.state, {})
  checkpointer.close()
  again, checkpointer = make_learner(objective=probing), Checkpointer(tmp_path)
  again.restore(checkpointer.restore_latest(again.abstract_state()).state)
  checkpointer.close()
  again.train(groups).result()
  assert float(again.state.objective['trust_region']) == pytest.approx(2.0)


def test_host_boxes_may_read_scores_of_current_and_starting_weights(make_learner, make_groups):
  seen = []

  def estimate(batch):
    seen.append((batch.log_probs_t, batch.anchor_log_probs_t))
    return batch.reward - batch.reward.mean()

  box = Box(estimate, formula='A', tags=frozenset({'host_scores'}))
  objective = dataclasses.replace(resolve(), advantage=BoundBox('probe', box))
  groups, learner = make_groups(), make_learner(objective=objective)
  want = [
    score[t.mask_t]
    for group, scores in zip(groups, learner.score(groups), strict=True)
    for t, score in zip(group.trajectories, scores, strict=True)
  ]
  learner.train(groups)
  learner.train(groups)
  for got, expected in zip(seen[0][0], want, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5)
  for first, second, anchor in zip(seen[0][0], seen[1][0], seen[1][1], strict=True):
    np.testing.assert_allclose(anchor, first, rtol=1e-5)
    assert np.abs(second - first).max() > 0


def test_truncated_answers_are_left_out_when_asked(make_learner, make_groups):
  groups = make_groups()
  cut = [
    dataclasses.replace(
      g, trajectories=(dataclasses.replace(g.trajectories[0], finish_reason='length'), *g.trajectories[1:])
    )
    for g in groups
  ]  # fmt: skip
  found = make_learner(objective=resolve(shaping=('mask_truncated',))).train(cut).result()
  kept = sum(int(t.mask_t.sum()) for g in groups for t in g.trajectories[1:])
  assert found['trained_tokens'] == kept


def test_scores_of_a_batch_are_those_of_its_parts(tiny, tiny_params, make_learner, make_groups):
  learner = make_learner(rows=_PLAN)
  packed = learner._pack_to_train(make_groups())[0]
  batch, num_micro = learner._place(packed)
  score = jax.jit(lambda p: score_batch(p, tiny, batch, num_micro, ForwardSettings()))
  found = score(tiny_params)
  assert found.entropy.shape == batch.mask_t.shape
  assert (np.asarray(found.log_prob)[np.asarray(batch.mask_t)] < 0).all()
  assert (np.asarray(found.log_prob)[~np.asarray(batch.mask_t)] == 0).all()
  assert jax.tree.leaves(found)[0].dtype == jnp.float32
