"""Updates of a critic in the learner, and that the policy does not feel it otherwise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlax_stack.learner import critic as critics
from rlax_stack.learner import packing
from rlax_stack.learner.optimizer import OptimizerSettings
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.objectives.objective import resolve
from rlax_stack.types import Reward

_NAMES = ('loss', 'grad_norm', 'critic_grad_norm', 'value_loss', 'value_mean', 'explained_variance')


@pytest.fixture(scope='module')
def groups(cut_groups):
  return cut_groups


def _leaves(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _assert_equal(got, want):
  for a, b in zip(_leaves(got), _leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)


def _largest_move(got, want):
  return max(np.abs(a - b).max() for a, b in zip(_leaves(got), _leaves(want), strict=True))


def _update(learner, groups):
  """Metrics, and the first moments of policy and critic after one step."""
  metrics = learner.train(groups).result()
  moments = _leaves((learner.state.opt_state[1].mu, learner.state.critic['opt_state'][1].mu))
  return metrics, moments


def _assert_same_update(got, want, rtol=2e-5):
  for name in _NAMES:
    np.testing.assert_allclose(got[0][name], want[0][name], rtol=rtol, atol=1e-6, err_msg=name)
  for a, b in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-5 * np.abs(b).max() + 1e-9)


_CRITICS = {
  'separate': 'separate(delta_value=0.05, updates=2)',
  'shared_trunk': 'shared_trunk(trunk_coef=0.5)',
}


@pytest.fixture(scope='module', params=sorted(_CRITICS))
def case(request, make_critic_learner, groups):
  critic = _CRITICS[request.param]
  return critic, _update(make_critic_learner(critic), groups)


@pytest.mark.parametrize(
  'plan',
  [
    RowPlan(shape=RowShape(97, 80), micro_batch_rows=2, max_micro_batches=3),
    RowPlan(shape=RowShape(21, 14), micro_batch_rows=2, max_micro_batches=4),
  ],
  ids=['more padding', 'groups split'],
)
def test_update_does_not_depend_on_rows(plan, case, make_critic_learner, groups):
  _assert_same_update(_update(make_critic_learner(case[0], rows=plan), groups), case[1])


_MESHES = ({'data': 4}, {'data': 2, 'fsdp': 2, 'tensor': 2})


@pytest.mark.slow
@pytest.mark.parametrize('mesh', _MESHES, ids=str)
def test_update_does_not_depend_on_the_mesh(mesh, case, make_critic_learner, groups):
  learner = make_critic_learner(case[0], mesh=mesh)
  if mesh.get('fsdp') and 'separate' in case[0]:
    kernel = learner.state.critic['params']['layers']['q_proj']['kernel']
    assert kernel.sharding == learner.params['layers']['q_proj']['kernel'].sharding
  _assert_same_update(_update(learner, groups), case[1], rtol=5e-5)


@pytest.mark.slow
def test_update_does_not_depend_on_packing(case, make_critic_learner, groups, monkeypatch):
  order = [groups[i] for i in (2, 0, 1)]
  _assert_same_update(_update(make_critic_learner(case[0]), order), case[1])
  monkeypatch.setattr(packing, 'pack_groups', packing.pack_separate)
  plan = RowPlan(shape=RowShape(17, 8), micro_batch_rows=3, max_micro_batches=3)
  _assert_same_update(_update(make_critic_learner(case[0], rows=plan), groups), case[1])


@pytest.mark.slow
def test_a_separate_critic_leaves_the_policy_its_own_gradient(make_critic_learner, groups):
  """Whatever the value loss weighs; a shared trunk feels it unless its factor is 0."""

  def policy_update(critic):
    learner = make_critic_learner(critic)
    learner.train(groups).result()
    return learner.state.opt_state[1].mu

  want = policy_update('separate(coef=0.1)')
  _assert_equal(policy_update('separate(coef=10.0)'), want)
  held = policy_update('shared_trunk(coef=1.0, trunk_coef=0.0)')
  flows = policy_update('shared_trunk(coef=1.0, trunk_coef=1.0)')
  half = policy_update('shared_trunk(coef=1.0, trunk_coef=0.5)')
  weighed = policy_update('shared_trunk(coef=0.5, trunk_coef=1.0)')
  assert _largest_move(flows, held) > 1e-4
  for a, b, c, d in zip(*map(_leaves, (held, half, flows, weighed)), strict=True):
    np.testing.assert_allclose(b, (a + c) / 2, rtol=1e-3, atol=1e-6 + 1e-4 * np.abs(c).max())
    np.testing.assert_allclose(b, d, rtol=1e-3, atol=1e-6 + 1e-4 * np.abs(c).max())


def test_critic_starts_at_zero_and_as_the_policy(tiny, tiny_params, make_critic_learner, groups):
  config = dataclasses.replace(tiny, tie_embeddings=False)
  tiny_params = tiny_params | {'lm_head': {'kernel': tiny_params['embedder']['embedding'][::-1]}}
  learner = make_critic_learner(random_head=False, config=config, params=tiny_params)
  params = dict(learner.state.critic['params'])
  head = params.pop('value_head')
  assert {name: leaf.shape for name, leaf in head.items()} == {'kernel': (1, 16), 'bias': (1,)}
  assert all((leaf == 0).all() for leaf in _leaves(head))
  assert 'lm_head' not in params
  _assert_equal(params, {name: tiny_params[name] for name in params})
  assert list(make_critic_learner('shared_trunk').state.critic['params']) == ['value_head']
  found = learner.train(groups).result()
  assert found['value_mean'] == found['explained_variance'] == 0.0
  assert found['value_target_mean'] > 0


@pytest.mark.parametrize(
  'critic', [pytest.param('separate', marks=pytest.mark.slow), 'shared_trunk']
)
def test_pretraining_moves_the_critic_alone(critic, make_critic_learner, groups):
  text = f'{critic}(pretrain_updates=2)'
  learner = make_critic_learner(text, random_head=False)
  before, moments = learner.snapshot(), _leaves(learner.state.opt_state)
  values = []
  for _ in range(2):
    critic_before = _leaves(learner.state.critic['params'])
    found = learner.train(groups).result()
    values.append(found['value_loss'])
    assert found['learning_rate'] == 0.0
    assert _largest_move(learner.state.critic['params'], critic_before) > 1e-4
  _assert_equal(learner.params, before)
  _assert_equal(learner.state.opt_state, moments)
  assert learner.version == 2 and values[1] < values[0]
  found = learner.train(groups).result()
  assert found['learning_rate'] == pytest.approx(1e-2)
  assert _largest_move(learner.params, before) > 1e-4


@pytest.mark.slow
def test_a_controlled_box_stands_still_while_the_critic_is_pretrained(make_critic_learner, groups):
  boxes = {'regularisers': ('adaptive_entropy(start=0.01, target=9.0)',)}
  learner = make_critic_learner('separate(pretrain_updates=1)', boxes=boxes)
  coefs = [float(learner.state.objective['regularisers/0']['coef'])]
  for _ in range(2):
    learner.train(groups).result()
    coefs.append(float(learner.state.objective['regularisers/0']['coef']))
  assert coefs[0] == coefs[1] != coefs[2]


@pytest.mark.slow
def test_several_updates_and_their_learning_rate(make_critic_learner, groups):
  """Adam's first steps are of the size of the rate: two go about twice as far as one."""
  optimizer = OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9, warmup_steps=4)
  moved = {}
  for text in ('separate', 'separate(updates=2)', 'separate(learning_rate=2e-3)'):
    learner = make_critic_learner(text, optimizer=optimizer)
    before = _leaves(learner.state.critic['params'])
    learner.train(groups).result()
    moved[text] = _largest_move(learner.state.critic['params'], before)
    assert int(learner.state.critic['opt_state'][1].count) == 1 + ('updates' in text)
    assert int(learner.state.opt_state[1].count) == 1
  assert moved['separate'] == pytest.approx(1e-2 / 4, rel=0.01)
  assert moved['separate(learning_rate=2e-3)'] == pytest.approx(2e-3 / 4, rel=0.01)
  # The warm-up of the critic counts its own updates: 1/8 and 2/8 of the rate.
  assert moved['separate(updates=2)'] == pytest.approx(1e-2 * 3 / 8, rel=0.1)


def test_schedule_of_the_critic_counts_its_own_updates():
  policy = OptimizerSettings(learning_rate=1e-3, warmup_steps=3, decay='linear', total_steps=20)
  text = 'separate(learning_rate=0.1, updates=2, pretrain_updates=5)'
  critic = resolve(advantage='gae', critic=text).critic_settings
  made = critics.critic_optimizer(critic, policy)
  assert (made.learning_rate, made.warmup_steps, made.total_steps) == (0.1, 6, 50)
  plain = resolve(advantage='gae', critic='separate').critic_settings
  assert critics.critic_optimizer(plain, policy) == policy


@pytest.mark.slow
def test_frozen_attention_stays_as_it_started(make_critic_learner, groups):
  optimizer = OptimizerSettings(learning_rate=1e-2, weight_decay=0.5, max_grad_norm=1e9)
  free, frozen = (
    make_critic_learner(f'separate(freeze_attention={freeze})', optimizer=optimizer)
    for freeze in (False, True)
  )
  before = jax.tree.map(np.asarray, frozen.state.critic['params'])
  found = [learner.train(groups).result() for learner in (free, frozen)]
  assert found[1]['critic_grad_norm'] < found[0]['critic_grad_norm']
  after = frozen.state.critic['params']
  for name in ('q_proj', 'k_proj', 'v_proj', 'o_proj'):
    _assert_equal(after['layers'][name], before['layers'][name])
    assert _largest_move(free.state.critic['params']['layers'][name], before['layers'][name]) > 0
  for name in ('gate_proj', 'up_proj', 'down_proj', 'attn_norm'):
    assert _largest_move(after['layers'][name], before['layers'][name]) > 0
  assert _largest_move(after['value_head'], before['value_head']) > 0


def test_a_bad_batch_moves_neither_policy_nor_critic(make_critic_learner, groups):
  learner = make_critic_learner()
  state = learner.state
  spoilt = dict(state.critic['params'])
  spoilt['value_head'] = spoilt['value_head'] | {'bias': jnp.full((1,), jnp.nan)}
  learner.restore(state._replace(critic=state.critic | {'params': spoilt}))
  before = _leaves((learner.params, learner.state.opt_state, learner.state.critic))
  found = learner.train(groups).result()
  assert found['skipped'] == found['skipped_in_row'] == 1.0
  _assert_equal((learner.params, learner.state.opt_state, learner.state.critic), before)


def test_a_non_finite_further_update_of_the_critic_is_skipped_too(make_critic_learner, groups):
  """The first update is finite and makes the second one overflow."""
  optimizer = OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9)
  learner = make_critic_learner('separate(updates=2, learning_rate=1e30)', optimizer=optimizer)
  before = _leaves((learner.params, learner.state.critic))
  found = learner.train(groups).result()
  assert np.isfinite(found['value_loss']) and found['skipped'] == 1.0
  _assert_equal((learner.params, learner.state.critic), before)


@pytest.mark.slow
def test_targets_of_a_batch_are_those_of_its_start(make_critic_learner, groups):
  """With several updates per batch the values, and so advantages and targets, are scored once."""
  found = {}
  for updates in (1, 3):
    learner = make_critic_learner('separate(delta_value=1e-6)', updates_per_batch=updates)
    found[updates] = learner.train(groups).result()
  for name in ('value_mean', 'value_target_mean', 'explained_variance'):
    assert found[3][name] == found[1][name]
  # The clip is around the values at the start: after one update many have left it.
  assert found[1]['value_clip_fraction'] == 0.0 < found[3]['value_clip_fraction']


def _single(make_groups, seed, rewards):
  """One sample per prompt, each with its own reward."""
  groups = make_groups(seed=seed, sizes=(1,) * len(rewards), prompt_lengths=(4,) * len(rewards))

  def scored(group, reward):
    one = dataclasses.replace(group.trajectories[0], reward=Reward(value=reward))
    return dataclasses.replace(group, trajectories=(one,))

  return [scored(group, reward) for group, reward in zip(groups, rewards, strict=True)]


def test_one_sample_per_prompt(make_groups, make_critic_learner):
  """SAO's boxes over groups of one: critic first, then the policy, on samples of other weights."""
  learner = make_critic_learner(
    'separate(learning_rate=1e-2, updates=2, freeze_attention=True, pretrain_updates=2)',
    random_head=False,
    advantage='length_adaptive_gae(alpha=1.5)',
    boxes={
      'ratio': 'token(base="behaviour")',
      'trust_region': 'double_sided(delta_low=0.3, delta_high=5.0)',
    },
  )
  groups = _single(make_groups, 4, (1.0, 0.0, 1.0, 0.0, 1.0))
  scores = [g[0] for g in learner.score(groups)]
  groups = [
    dataclasses.replace(
      group,
      trajectories=(dataclasses.replace(group.trajectories[0], behaviour_log_probs_t=score),),
    )
    for group, score in zip(groups, scores, strict=True)
  ]
  before, losses = learner.snapshot(), []
  for _ in range(2):
    losses.append(learner.train(groups).result()['value_loss'])
  _assert_equal(learner.params, before)
  for _ in range(6):
    losses.append(learner.train(groups).result()['value_loss'])
  assert losses[-1] < 0.5 * losses[0]
  after = [of_group[0] for of_group in learner.score(groups)]
  right = [(new - old).sum() for new, old in zip(after[::2], scores[::2], strict=True)]
  assert np.mean(right) > 0  # answers of reward 1 became likelier


def test_one_update_is_that_of_its_transform():
  """Weight decay alone moves what has no gradient, and nothing of a frozen attention."""
  params = {'q_proj': {'kernel': jnp.ones(2)}, 'gate_proj': {'kernel': jnp.ones(2)}}
  gradient = jax.tree.map(lambda x: 3.0 * x, params)
  transform = optax.chain(optax.add_decayed_weights(1.0), optax.scale(-0.1))
  state = {'params': params, 'opt_state': transform.init(params)}
  for freeze, want in ((False, 0.6), (True, 1.0)):
    text = f'separate(freeze_attention={freeze})'
    critic = resolve(advantage='gae', critic=text).critic_settings
    moved, norm = critics.updated(critic, transform, gradient, state)
    np.testing.assert_allclose(moved['params']['q_proj']['kernel'], want, rtol=1e-6)
    np.testing.assert_allclose(moved['params']['gate_proj']['kernel'], 0.6, rtol=1e-6)
    assert norm == pytest.approx(3.0 * np.sqrt(2 if freeze else 4))
