"""A learner that trains an adapter: only that moves and is saved, meshes agree, the anchor is the base."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.learner.gradient_norms import squared_gradient_norms
from rlax_stack.learner.scoring import micro_batch, target_log_probs, weight_shapes
from rlax_stack.models.adapter import AdapterSettings, merge, model_weights
from rlax_stack.models.frozen import freeze
from rlax_stack.objectives.objective import resolve
from rlax_stack.sharding import param_shardings

SETTINGS = AdapterSettings(kind='lora', rank=2, alpha=4.0, targets=('*_proj/kernel',))
ANCHORED = {'objective': resolve(corrections=(), regularisers=('kl_anchor(coef=0.1)',))}


@pytest.fixture(scope='module')
def make(make_learner, settings):
  """Function (AdapterSettings, other arguments of make_learner) -> a fresh Learner over them."""

  def learner(adapter=SETTINGS, **replace):
    forward = dataclasses.replace(settings.forward, adapter=adapter)
    return make_learner(forward=forward, **ANCHORED, **replace)

  return learner


def _flat(groups):
  return np.concatenate([score for group in groups for score in group])


def test_only_the_adapter_is_trained_published_and_saved(tmp_path, make, make_groups, tiny_params):
  learner, batch = make(), make_groups()
  base = learner.frozen[0]
  before = _flat(learner.score(batch))
  metrics = learner.train(batch).result()
  assert metrics['grad_norm'] > 0 and metrics['skipped'] == 0
  jax.tree.map(np.testing.assert_array_equal, base, tiny_params)
  published = learner.snapshot()
  assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(published)} == {
    'lora_a',
    'lora_b',
  }
  count = sum(leaf.size for leaf in jax.tree.leaves(published))
  moments = [leaf for leaf in jax.tree.leaves(learner.state.opt_state) if leaf.ndim]
  assert sum(leaf.size for leaf in moments) == 2 * count
  after = _flat(learner.score(batch))
  assert np.abs(after - before).max() > 1e-3

  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, learner.state, {})
  checkpointer.wait()
  learner.train(batch)
  again = make()
  again.restore(checkpointer.restore_latest(again.abstract_state()).state)
  checkpointer.close()
  np.testing.assert_array_equal(_flat(again.score(batch)), after)
  again.train(batch)
  jax.tree.map(np.testing.assert_array_equal, again.state, learner.state)


def test_scores_are_those_of_merged_weights_and_the_anchor_is_the_base(
  make, make_learner, make_groups
):
  learner, batch = make(), make_groups()
  plain = make_learner(**ANCHORED)
  np.testing.assert_array_equal(_flat(learner.score(batch)), _flat(plain.score(batch)))
  np.testing.assert_array_equal(
    _flat(learner._score_under(learner._anchor, batch)), _flat(plain.score(batch))
  )
  first = learner.train(batch).result()
  assert first['kl_anchor'] == 0.0
  second = learner.train(batch).result()
  assert second['kl_anchor'] > 0.0
  np.testing.assert_array_equal(
    _flat(learner._score_under(learner._anchor, batch)), _flat(plain.score(batch))
  )
  merged = merge(learner.snapshot(), learner.frozen[0], SETTINGS)
  np.testing.assert_allclose(
    _flat(learner.score(batch)), _flat(plain._score_under(merged, batch)), atol=1e-4
  )


@pytest.mark.slow
def test_eight_devices_train_as_one_does(make, make_groups):
  adapter = dataclasses.replace(SETTINGS, kind='dora', base='int4')
  alone, spread = make(adapter), make(adapter, mesh={'data': 2, 'fsdp': 2, 'tensor': 2})
  values = spread.frozen[0]['layers']['q_proj']['kernel'].values
  assert values.sharding.shard_shape(values.shape) == (2, 16, 8)
  for _ in range(2):
    want, got = alone.train(make_groups()).result(), spread.train(make_groups()).result()
    assert got['grad_norm'] == pytest.approx(want['grad_norm'], rel=1e-4)
    assert got['loss'] == pytest.approx(want['loss'], abs=1e-5)
  np.testing.assert_allclose(
    _flat(spread.score(make_groups())), _flat(alone.score(make_groups())), atol=2e-4
  )


def test_leaves_lie_as_their_kernels_do(make, tiny, settings):
  mesh = make(mesh={'fsdp': 2, 'tensor': 2})._mesh
  adapter = dataclasses.replace(SETTINGS, kind='dora', base='int8')
  forward = dataclasses.replace(settings.forward, adapter=adapter)
  trained, (base,) = param_shardings(weight_shapes(tiny, forward), mesh)
  specs = {
    name: [tuple(parts[leaf].spec) for leaf in ('lora_a', 'lora_b', 'magnitude')]
    for name, parts in trained['layers'].items()
  }
  assert specs['q_proj'] == [(None, None, 'fsdp'), (None, 'tensor', None), (None, 'tensor')]
  assert specs['down_proj'] == [(None, None, 'tensor'), (None, 'fsdp', None), (None, 'fsdp')]
  kernel = base['layers']['down_proj']['kernel']
  assert tuple(kernel.values.spec) == (None, 'fsdp', 'tensor')
  assert tuple(kernel.scales.spec) == (None, 'fsdp', None)


def test_weights_that_are_frozen_already_are_taken_as_they_are(make, tiny_params):
  adapter = dataclasses.replace(SETTINGS, base='int8')
  base = freeze(tiny_params, 'int8')
  jax.tree.map(np.testing.assert_array_equal, make(adapter, params=base).frozen, (base,))


def test_a_critic_on_the_policy_and_averaged_weights_go_with_an_adapter(
  make_critic_learner, settings, make_groups
):
  boxes = {'ratio': 'token(base="ema", decay=0.5)', 'trust_region': 'none'}
  learner = make_critic_learner(
    'shared_trunk', boxes=boxes, forward=dataclasses.replace(settings.forward, adapter=SETTINGS)
  )
  before, batch = learner.snapshot(), make_groups()
  metrics = learner.train(batch).result()
  assert metrics['critic_grad_norm'] > 0 and metrics['grad_norm'] > 0
  assert metrics['skipped'] == 0 and list(learner.state.critic['params']) == ['value_head']
  # Weights of two updates, the older one weighing half.
  want = jax.tree.map(lambda old, new: (0.5 * old + new) / 1.5, before, learner.params)
  got = learner.state.average['params']
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


@pytest.mark.slow
def test_gradient_norms_are_those_of_the_adapter(make, tiny, settings, make_groups):
  learner, groups = make(), make_groups(sizes=(2,), prompt_lengths=(3,))
  forward = dataclasses.replace(settings.forward, adapter=SETTINGS)
  batch, num_micro = learner._place(learner._pack_to_train(groups)[0])
  (frozen,) = learner.frozen
  norms = jax.jit(
    lambda p, base: squared_gradient_norms(p, tiny, batch, num_micro, forward, None, base)
  )(learner.params, frozen)
  rows = micro_batch(batch, 0)
  ids, mask = np.asarray(rows.trajectory_t), np.asarray(rows.mask_t)

  @jax.jit
  @jax.grad
  def gradient(adapter, mine):
    model = model_weights(SETTINGS, adapter, frozen)
    return jnp.sum(target_log_probs(model, tiny, rows, forward).log_prob * mine)

  for trajectory in (0, 1):
    mine = mask & (ids == trajectory)
    found = gradient(learner.params, mine.astype(np.float32))
    want = sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(found))
    np.testing.assert_allclose(np.asarray(norms)[0][mine], want, rtol=1e-4)
