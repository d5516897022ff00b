"""A solver and a verifier trained together, as launch runs them: own and shared weights, exact resume."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from rlax_stack import assembly, command_line, role_assembly
from rlax_stack import launch as launcher
from rlax_stack.errors import CheckpointError, ConfigError
from rlax_stack.export import export
from rlax_stack.learner.checkpoint import load_checkpoint_params
from rlax_stack.learner.joint_learner import JointLearner
from rlax_stack.models.load import load_model
from rlax_stack.observe.run_folder import RunFolder
from rlax_stack.role_config import policy_configs
from rlax_stack.train_loop import TrainLoop, role_metrics
from rlax_stack.types import Group, Prompt
from tests.integration.test_end_to_end import metrics_of

ROLES = '--config=tests/integration/roles_config.py'
GROUP, PROMPTS, ANSWERS, VERDICTS = 8, 2, 2, 4
SMALL = (f'--config.rollout.group_size={GROUP}', f'--config.rollout.groups_per_step={PROMPTS}')


def train_here(toy_arguments, workdir, *flags, crash_after=None):
  """Trains in this process, in the end or up to a crash; the config, the batches and the metrics of the steps."""
  changed = {flag.partition('=')[0] for flag in (ROLES, *SMALL, *flags)}
  kept = [flag for flag in toy_arguments(workdir) if flag.partition('=')[0] not in changed]
  float32 = '--config.model.compute_dtype=float32'
  config, _ = command_line.parse(['launch', ROLES, *kept, *SMALL, float32, *flags])
  batches, train = [], JointLearner.train

  def recorded(learner, groups):
    if len(batches) == crash_after:
      raise _CrashError
    batches.append(groups)
    return train(learner, groups)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(launcher, 'enable_compile_cache', lambda: None)
    patch.setattr(JointLearner, 'train', recorded)
    folder = RunFolder(str(workdir), 'toy')
    if crash_after is None:
      assert launcher.train(config, folder, command=[]) == 0
    else:
      with pytest.raises(_CrashError):
        launcher.train(config, folder, command=[])
  return config, batches, metrics_of(workdir)


class _CrashError(Exception):
  """Ends a run without a word."""


@pytest.fixture(scope='module')
def own(toy_arguments, tmp_path_factory):
  """A run whose verifier has weights of its own: its folder, config, batches and metrics."""
  workdir = tmp_path_factory.mktemp('own')
  return workdir, *train_here(toy_arguments, workdir, '--config.steps=20')


def saved_weights(workdir, policy):
  tree = load_checkpoint_params(workdir / 'toy' / 'checkpoints', policy=policy)
  return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def train_alone(config, model, batches, policy, group_of):
  """The weights of one Learner after the groups that `group_of` takes of every batch; checks the engine on the way."""
  learner = assembly.make_learner(policy_configs(config)[policy], model)
  for index, batch in enumerate(batches):
    groups = [group for visit in batch for group in group_of(visit)]
    if not index:
      for group, scores in zip(groups, learner.score(groups), strict=True):
        for trajectory, score in zip(group.trajectories, scores, strict=True):
          gap = np.abs(trajectory.behaviour_log_probs_t - score)[trajectory.mask_t]
          assert gap.max() <= 1e-4
    learner.train(groups).result()
  return [np.asarray(leaf) for leaf in jax.tree.leaves(learner.params)]


def check_verdicts(batches, model):
  """Every verdict is on the answer of its index, and its reward is agreement with the rule."""
  for visit in (visit for batch in batches for visit in batch):
    assert len(visit.trajectories) == GROUP and len(visit.others) == ANSWERS
    for k, other in enumerate(visit.others):
      answer = visit.trajectories[k]
      question = visit.prompt.messages[0].content
      (asked,) = other.prompt.messages
      assert asked.content == f'{question} {answer.text}'
      np.testing.assert_array_equal(
        other.prompt_tokens, model.tokenizer.encode_chat(other.prompt.messages)
      )
      said = []
      for j, verdict in enumerate(other.trajectories):
        assert (verdict.role, verdict.sample_index) == ('verifier', GROUP + k * VERDICTS + j)
        words = [word for word in verdict.text.split() if word in ('one', 'two')]
        said.append(words[-1] if words else None)
        truth = 'one' if answer.text.strip() == visit.prompt.answer else 'two'
        assert verdict.reward.value == float(said[-1] == truth)
      assert answer.reward.parts['verifier'] == said.count('one') / VERDICTS
      assert answer.reward.value == answer.reward.parts['exact']


@pytest.mark.slow
def test_own_weights_learn_each_from_their_role_alone(own):
  workdir, config, batches, lines = own
  assert max(line['perf/compilations'] for line in lines) == 0.0
  reward, agreement = ([line[f'{n}reward/mean'] for line in lines] for n in ('', 'verifier/'))
  assert np.mean(agreement[:3]) < 0.3 and np.mean(agreement[7:17]) > 0.5, agreement
  assert np.mean(reward[-5:]) > np.mean(reward[:5]) + 0.15, reward
  assert lines[-1]['fleet/trained'] == 20 * PROMPTS * (GROUP + ANSWERS * VERDICTS)
  rewards = [t.reward.value for visit in batches[7] for o in visit.others for t in o.trajectories]
  assert role_metrics(batches[7])['verifier/reward/mean'] == agreement[7] == np.mean(rewards)
  model = assembly.load_checked_model(config, {})
  check_verdicts(batches, model)
  for policy, group_of in (('', lambda visit: [visit]), ('judge', lambda visit: visit.others)):
    want = train_alone(config, model, batches, policy, group_of)
    for one, other in zip(want, saved_weights(workdir, policy), strict=True):
      np.testing.assert_array_equal(one, other)
  export(run=str(workdir / 'toy'), out=str(workdir / 'judge'), policy='judge')
  exported = jax.tree.leaves(load_model(workdir / 'judge').params)
  for one, other in zip(exported, saved_weights(workdir, 'judge'), strict=True):
    np.testing.assert_array_equal(one, other)
  with pytest.raises(CheckpointError, match="has no policy 'critic'"):
    export(run=str(workdir / 'toy'), out=str(workdir / 'critic'), policy='critic')
  rates = [line['judge/train/learning_rate'] for line in lines]
  assert set(rates) == {np.float32(0.02)} and lines[0]['train/learning_rate'] == np.float32(0.01)


@pytest.mark.slow
def test_shared_weights_learn_from_both_roles_at_once(toy_arguments, tmp_path):
  shared = ('--config.roles.policy=', '--config.policies={}', '--config.steps=4')
  config, batches, lines = train_here(toy_arguments, tmp_path, *shared)
  assert max(line['perf/compilations'] for line in lines) == 0.0
  model = assembly.load_checked_model(config, {})
  check_verdicts(batches, model)
  want = train_alone(config, model, batches, '', lambda visit: visit.of_all_roles)
  for one, other in zip(want, saved_weights(tmp_path, ''), strict=True):
    np.testing.assert_array_equal(one, other)
  assert 'verifier/reward/mean' in lines[0]


@pytest.mark.slow
def test_crashed_and_resumed_equals_never_crashed(own, toy_arguments, tmp_path):
  whole, _, _, want = own
  train_here(toy_arguments, tmp_path, '--config.steps=20', crash_after=12)
  _, batches, got = train_here(toy_arguments, tmp_path, '--config.steps=20')
  assert len(batches) == 10  # from the checkpoint of step 10
  for policy in ('', 'judge'):
    for one, other in zip(
      saved_weights(whole, policy), saved_weights(tmp_path, policy), strict=True
    ):
      np.testing.assert_array_equal(one, other)
  same = ('reward/mean', 'verifier/reward/mean', 'train/loss', 'judge/train/loss', 'fleet/trained')
  for one, other in zip(want, got, strict=True):
    assert {name: one[name] for name in same} == {name: other[name] for name in same}


def test_adapters_of_one_model_share_its_frozen_weights(toy_arguments):
  flags = ('--config.learner.adapter.kind=lora', '--config.learner.adapter.base=int8', *SMALL)
  kept = [flag for flag in toy_arguments('unused') if flag.partition('=')[0] not in ROLES]
  config, _ = command_line.parse(['launch', ROLES, *kept, *flags])
  model = assembly.load_checked_model(config, {})
  models = role_assembly.policy_models(config, model)
  joint = role_assembly.make_learner(config, models)
  (solver,), (judge,) = (learner.frozen for learner in joint._learners.values())
  for one, other in zip(jax.tree.leaves(solver), jax.tree.leaves(judge), strict=True):
    assert one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()
  assert joint._learners['judge']._settings.optimizer.learning_rate == 0.02
  verdicts = role_assembly.make_verdicts(config, models)
  assert (verdicts.num_samples, verdicts.policy, verdicts.words) == (16, 'judge', ('one', 'two'))
  assert verdicts.sampling.max_tokens == 2 and verdicts.label == 'exact'
  long = dataclasses.replace(config.roles, max_prompt_tokens=63)
  with pytest.raises(ConfigError, match=r'max_prompt_tokens \+ 2 tokens after it = 65 exceeds'):
    role_assembly.policy_models(dataclasses.replace(config, roles=long), model)
  assembly.check_context(config, model)


@pytest.mark.parametrize('skipped', ['', 'judge'])
def test_a_policy_that_skips_its_step_filters_its_role_alone(skipped):
  def group(role, *others):
    prompt = Prompt(prompt_id='p', messages=(), answer='')
    tokens = np.zeros(1, np.int32)
    return Group(
      group_id=0, prompt=prompt, prompt_tokens=tokens, trajectories=(), role=role, others=others
    )

  verdicts, told = group('verifier'), []
  visit = group('', verdicts)
  loop = object.__new__(TrainLoop)
  loop._parts = types.SimpleNamespace(
    roles={'': '', 'verifier': 'judge'},
    coordinator=types.SimpleNamespace(
      mark_trained=lambda groups: told.append(('trained', groups)),
      mark_filtered=lambda groups: told.append(('filtered', groups)),
    ),
  )
  names = {'': 'train/skipped_in_row', 'judge': 'judge/train/skipped_in_row'}
  loop._end([visit], {name: float(policy == skipped) for policy, name in names.items()})
  ends = ('filtered', 'trained') if skipped else ('trained', 'filtered')
  assert told == [(ends[0], [verdicts]), (ends[1], [visit])]
