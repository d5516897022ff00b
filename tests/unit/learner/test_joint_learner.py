"""Several learners as one: each trains on its roles' groups alone, and all are saved in one commit."""

import dataclasses

import jax
import numpy as np
import pytest

from rlax_stack.errors import CheckpointError, DataError
from rlax_stack.learner.checkpoint import Checkpointer, load_checkpoint_params
from rlax_stack.learner.joint_learner import JointLearner, JointMetrics
from rlax_stack.learner.optimizer import OptimizerSettings
from rlax_stack.models.adapter import AdapterSettings

ROLES = {'': '', 'verifier': 'judge'}
FASTER = OptimizerSettings(learning_rate=3e-2, max_grad_norm=1e9)


@pytest.fixture(scope='module')
def batch(make_groups):
  """Two groups, each with one or two of a verifier beside it."""
  first, second, *judged = make_groups(sizes=(3, 2, 4, 2, 2), prompt_lengths=(5, 3, 8, 4, 6))
  judged = [dataclasses.replace(group, role='verifier') for group in judged]
  return [
    dataclasses.replace(first, others=tuple(judged[:2])),
    dataclasses.replace(second, others=tuple(judged[2:])),
  ]


@pytest.fixture(scope='module')
def make_joint(make_learner):
  def make(roles=ROLES, **judge):
    learners = {'': make_learner()}
    if 'judge' in roles.values():
      learners['judge'] = make_learner(optimizer=FASTER, **judge)
    return JointLearner(learners, roles)

  return make


def assert_same(one, other):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


def test_own_weights_see_their_role_alone(make_joint, make_learner, batch):
  joint, solver, judge = make_joint(), make_learner(), make_learner(optimizer=FASTER)
  want = [
    (solver.train(batch).result(), judge.train([o for g in batch for o in g.others]).result())
    for _ in range(2)
  ]
  assert joint.prepare(batch)
  for first, second in want:
    step = joint.train(batch)
    assert isinstance(step, JointMetrics)
    got = step.result()
    assert step.is_ready() and set(step.seconds()) == {'data', 'log_probs', 'train'}
    assert all(value >= 0 for value in step.seconds().values())
    for name, value in first.items():
      assert name == 'prepared_ahead' or got[name] == value, name
    for name, value in second.items():
      assert name == 'prepared_ahead' or got[f'judge/train/{name}'] == value, name
  assert joint.version == 2
  assert_same(joint.snapshot(), {'': solver.snapshot(), 'judge': judge.snapshot()})


def test_shared_weights_see_all_groups_at_once(make_joint, make_learner, batch):
  joint, alone = make_joint({'': '', 'verifier': ''}), make_learner()
  want = alone.train([g for visit in batch for g in (visit, *visit.others)]).result()
  got = joint.train(batch).result()
  assert {k: got[k] for k in want} == want
  assert_same(joint.snapshot(), {'': alone.snapshot()})


def test_all_policies_are_one_commit(make_joint, batch, tmp_path):
  adapter = AdapterSettings(kind='lora', rank=2, alpha=4.0, targets=('*q_proj/kernel',))
  base = make_joint()._learners['']._settings.forward
  judge = {'forward': dataclasses.replace(base, adapter=adapter)}
  joint = make_joint(**judge)
  joint.train(batch).result()
  checkpointer = Checkpointer(tmp_path / 'c', asynchronous=False)
  checkpointer.warm_up(joint.state)
  assert joint.adapter_identity is None
  assert joint.host_state['policies']['judge']['adapter']['rank'] == 2
  checkpointer.save(1, joint.state, {'objective': joint.host_state})
  fresh = make_joint(**judge)
  restored = checkpointer.restore_latest(fresh.abstract_state())
  fresh.restore(restored.state, restored.extras['objective'])
  assert fresh.version == 1
  assert_same(fresh.state, joint.state)
  assert_same(load_checkpoint_params(tmp_path / 'c'), joint.state[''].params)
  saved = load_checkpoint_params(tmp_path / 'c', policy='judge')
  assert_same(saved, joint.state['judge'].params)
  with pytest.raises(CheckpointError, match="has no policy 'other'"):
    load_checkpoint_params(tmp_path / 'c', policy='other')
  with pytest.raises(CheckpointError, match='policy judge of the checkpoint holds an adapter of'):
    fresh.restore(restored.state, {'policies': {'judge': {'adapter': {'rank': 3}}}})
  single = make_joint({'': '', 'verifier': ''})
  with pytest.raises(CheckpointError, match=r"policies \['', 'judge'\] and this run has \[''\]"):
    checkpointer.restore_latest(single.abstract_state())
  joint.train(batch).result()
  mixed = {'': restored.state[''], 'judge': joint.state['judge']}
  with pytest.raises(CheckpointError, match="different versions, {'': 1, 'judge': 2}"):
    fresh.restore(mixed, restored.extras['objective'])
  checkpointer.close()


def test_what_cannot_be_trained_is_refused(make_joint, make_learner, batch):
  with pytest.raises(DataError, match=r"no group for the policies \['judge'\]"):
    make_joint().train([dataclasses.replace(batch[0], others=())])
  with pytest.raises(ValueError, match=r"no learner for the policies \['judge'\]"):
    JointLearner({'': make_learner()}, ROLES)
