"""Averaged weights as the proximal policy: their value, when they are scored, what keeps them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.learner.state import averaged
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.ratios import ema_decay

_DECAY = 0.7


def _objective(decay=_DECAY, **boxes):
  return resolve(ratio=f'token(base="ema", decay={decay})', trust_region='none', **boxes)


def _placed(tree):
  """The tree as float32 arrays on the device."""
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def _trees_close(first, second, **tolerance):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), first, second)


def test_average_weighs_past_weights_by_powers_of_the_decay():
  weights = np.random.default_rng(0).standard_normal((6, 3))
  average = {'params': {'w': jnp.asarray(weights[0], jnp.float32)}, 'weight': jnp.float32(1.0)}
  for step in range(1, 6):
    average = averaged(average, {'w': jnp.asarray(weights[step], jnp.float32)}, _DECAY)
    powers = _DECAY ** np.arange(step, -1, -1)
    want = powers @ weights[: step + 1] / powers.sum()
    np.testing.assert_allclose(average['params']['w'], want, rtol=1e-5)
  assert ema_decay(base='proximal') is None and ema_decay(base='ema', decay=0.3) == 0.3
  assert resolve().average_decay is None and _objective().average_decay == _DECAY


@pytest.mark.parametrize('mesh', [{}, {'data': 2, 'fsdp': 2, 'tensor': 2}], ids=str)
def test_proximal_scores_are_those_of_the_averaged_weights(mesh, make_learner, make_groups):
  """ρ of a batch is that of the current weights over the average of all weights before them."""
  groups, seen = make_groups(), []
  learner = make_learner(objective=_objective(corrections=()), mesh=mesh)
  snapshots, ratios = [learner.snapshot()], []
  for _ in range(4):
    powers = _DECAY ** np.arange(len(snapshots) - 1, -1, -1)
    mean = jax.tree.map(lambda *x, p=powers: np.tensordot(p, np.stack(x), 1) / p.sum(), *snapshots)
    _trees_close(learner.state.average['params'], mean, rtol=1e-4, atol=1e-5)
    seen.append(
      np.concatenate(
        [
          (now - then)[t.mask_t]
          for group, current, old in zip(
            groups, learner.score(groups), learner._score_under(_placed(mean), groups), strict=True
          )
          for t, now, then in zip(group.trajectories, current, old, strict=True)
        ]
      )
    )
    ratios.append(learner.train(groups).result()['ratio_mean'])
    snapshots.append(learner.snapshot())
  want = [np.exp(gap).mean() for gap in seen]
  np.testing.assert_allclose(ratios, want, rtol=1e-3)
  assert ratios[0] == 1.0 and abs(ratios[3] - 1.0) > 1e-4
  assert float(learner.state.average['weight']) == pytest.approx((_DECAY ** np.arange(5)).sum())


@pytest.mark.slow
def test_average_is_scored_before_every_update_of_a_batch(make_learner, make_groups):
  """Decay 0 makes the average the current weights: the ratio stays 1 in the second update too."""
  groups = make_groups()
  found = {}
  for name, objective in {
    'zero': _objective(decay=0.0, corrections=()),
    'plain': resolve(trust_region='none', corrections=()),
    'slow': _objective(decay=0.9, corrections=()),
  }.items():
    found[name] = make_learner(objective=objective, updates_per_batch=2).train(groups).result()
  assert found['zero']['ratio_mean'] == 1.0 and found['zero']['ratio_max'] == 1.0
  assert abs(found['plain']['ratio_mean'] - 1.0) > abs(found['slow']['ratio_mean'] - 1.0) > 1e-5


def test_corrections_weigh_the_average_against_the_behaviour_policy(make_learner, make_groups):
  objective = _objective(corrections=('token_tis(absolute_high=1e9)',))
  assert _objective().corrections[0].name == 'token_tis'  # auto, on policy too
  learner, groups = make_learner(objective=objective), make_groups()
  learner.train(groups)
  average = learner.state.average['params']
  scores = learner._score_under(jax.tree.map(jnp.copy, average), groups)
  weights = np.concatenate(
    [
      np.exp(np.clip(s - t.behaviour_log_probs_t, -20, 20))[t.mask_t]
      for group, of_group in zip(groups, scores, strict=True)
      for t, s in zip(group.trajectories, of_group, strict=True)
    ]
  )
  found = learner.train(groups).result()
  assert found['correction_mean'] == pytest.approx(weights.mean(), rel=2e-3)


def test_average_comes_back_from_a_checkpoint_and_others_have_none(
  tmp_path, make_learner, make_groups
):
  groups, learner = make_groups(), make_learner(objective=_objective())
  assert make_learner().state.average == {}
  learner.train(groups).result()
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, learner.state, {})
  checkpointer.close()
  again, checkpointer = make_learner(objective=_objective()), Checkpointer(tmp_path)
  again.restore(checkpointer.restore_latest(again.abstract_state()).state)
  checkpointer.close()
  for one in (learner, again):
    one.train(groups).result()
  jax.tree.map(np.testing.assert_array_equal, again.state.average, learner.state.average)
  jax.tree.map(np.testing.assert_array_equal, again.state.params, learner.state.params)


def test_skipped_update_leaves_the_average_alone(make_learner, make_groups):
  groups, learner = make_groups(), make_learner(objective=_objective())
  learner.train(groups).result()
  before = jax.tree.map(np.asarray, learner.state.average)
  bad = dataclasses.replace(
    groups[0].trajectories[0],
    behaviour_log_probs_t=np.full_like(groups[0].trajectories[0].behaviour_log_probs_t, np.nan),
  )
  broken = dataclasses.replace(groups[0], trajectories=(bad, *groups[0].trajectories[1:]))
  assert learner.train([broken, *groups[1:]]).result()['skipped'] == 1.0
  jax.tree.map(np.testing.assert_array_equal, learner.state.average, before)


def test_one_update_of_a_stale_batch_has_the_recomputed_proximal_policy(make_learner, make_groups):
  """Decoupled PPO: at one update per batch π_proximal is π of the step, whatever the staleness."""
  groups, learner = make_groups(), make_learner(objective=resolve(off_policy=True))
  learner.train(groups)
  scores = learner.score(groups)
  weights = np.concatenate(
    [
      np.minimum(np.exp(np.clip(s - t.behaviour_log_probs_t, -20, 20)), 2.0)[t.mask_t]
      for group, of_group in zip(groups, scores, strict=True)
      for t, s in zip(group.trajectories, of_group, strict=True)
    ]
  )
  found = learner.train(groups).result()  # now a version stale
  assert found['ratio_mean'] == 1.0 and found['ratio_max'] == 1.0
  assert found['correction_mean'] == pytest.approx(weights.mean(), rel=1e-4)
