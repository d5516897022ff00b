"""The learner on a mixture of experts: rows, meshes and the router's losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.learner.optimizer import OptimizerSettings
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import (
  ForwardSettings,
  batch_load,
  row_states,
  row_states_and_router,
)
from rlax_stack.learner.settings import check_mixture
from rlax_stack.models import decoder
from rlax_stack.objectives.router import NO_ROUTER_LOSS, RouterLoss
from rlax_stack.rollout.prefill import causal_attention
from rlax_stack.sharding import make_mesh
from rlax_stack.types import PackedBatch

# Updates that follow the gradient smoothly: Adam's first would be its sign.
SMOOTH = OptimizerSettings(learning_rate=0.5, eps=1.0, max_grad_norm=1e9)
COEFS = RouterLoss(aux_coef=0.5, z_coef=0.01)
ONE_ROW = RowPlan(shape=RowShape(128, 64), micro_batch_rows=1, max_micro_batches=2)
SPLIT = RowPlan(shape=RowShape(24, 24), micro_batch_rows=2, max_micro_batches=8)


@pytest.fixture(scope='module')
def mixture(tiny):
  return dataclasses.replace(
    tiny, num_experts=4, experts_per_token=2, moe_intermediate_size=16, qk_norm=True
  )


@pytest.fixture(scope='module')
def params(mixture):
  rng = np.random.default_rng(1)

  def draw(path, leaf):
    scale = 1.0 if path[-1].key == 'scale' else 0.4 * rng.standard_normal(leaf.shape)
    return np.broadcast_to(scale, leaf.shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(mixture))


@pytest.fixture(scope='module')
def learner(make_learner, mixture, params):
  """Function (mesh, LearnerSettings fields) -> Learner of the mixture."""
  return lambda **fields: make_learner(config=mixture, params=params, optimizer=SMOOTH, **fields)


@pytest.fixture(scope='module')
def groups(make_groups):
  return make_groups()


def _alone(params, config, tokens):
  """Log-probs [T, V] and each layer's router logits [L, T, E] of one sequence in a row of its own; float64."""
  hidden, (_, logits) = decoder.hidden_states_and_aux(
    params,
    config,
    jnp.asarray(tokens)[None],
    jnp.arange(len(tokens), dtype=jnp.int32)[None],
    lambda q, k, v: (causal_attention(q, k, v), None),
    observe=lambda routing: routing.logits[0],
  )
  scores = np.asarray(hidden[0], np.float64) @ np.asarray(decoder.lm_head(params, config)).T
  return scores - np.log(np.exp(scores).sum(-1, keepdims=True)), np.asarray(logits, np.float64)


@pytest.fixture(scope='module')
def separate(mixture, params, groups):
  """What each trajectory is by itself."""
  return [[_alone(params, mixture, t.tokens) for t in g.trajectories] for g in groups]


@pytest.mark.parametrize('rows', [ONE_ROW, SPLIT])
def test_scores_equal_separate_sequences(rows, learner, groups, separate):
  for group, scores, alone in zip(groups, learner(rows=rows).score(groups), separate, strict=True):
    for trajectory, score, (log_probs, _) in zip(group.trajectories, scores, alone, strict=True):
      at = np.flatnonzero(trajectory.mask_t)
      want = log_probs[at - 1, trajectory.tokens[at]]
      np.testing.assert_allclose(score[at], want, atol=2e-5)


def _router_by_hand(groups, separate, config):
  """Loads, aux and z over the different tokens of every group, in numpy."""
  tokens = {}
  for number, (group, alone) in enumerate(zip(groups, separate, strict=True)):
    for trajectory, (_, logits) in zip(group.trajectories, alone, strict=True):
      for i in range(len(trajectory.tokens) - 1):
        tokens[(number, *trajectory.tokens[: i + 1].tolist())] = logits[:, i]
  logits = np.stack(list(tokens.values()), axis=1)  # [L, N, E]
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  chosen = np.argsort(-logits, axis=-1)[..., : config.experts_per_token]
  load = np.stack([np.bincount(c.ravel(), minlength=config.num_experts) for c in chosen])
  n = logits.shape[1]
  aux = config.num_experts * (load / n * p.mean(1)).sum(-1).mean()
  return load, aux, (np.log(np.exp(logits).sum(-1)) ** 2).mean(), -(p * np.log(p)).sum(-1).mean()


@pytest.mark.slow
def test_router_loss_and_metrics_are_those_of_the_different_tokens(
  learner, groups, separate, mixture
):
  load, aux, z, entropy = _router_by_hand(groups, separate, mixture)
  found, losses, weights = [], [], []
  for rows in (ONE_ROW, SPLIT):
    for router in (NO_ROUTER_LOSS, COEFS):
      made = learner(rows=rows, router=router)
      found.append(made.train(groups).result())
      losses.append(found[-1]['loss'])
      weights.append(made.snapshot())
  for metrics in found:
    assert metrics['router_aux'] == pytest.approx(aux, rel=1e-5)
    assert metrics['router_z'] == pytest.approx(z, rel=1e-5)
    assert metrics['router_entropy'] == pytest.approx(entropy, rel=1e-5)
    relative = load / load.mean(1, keepdims=True)
    assert metrics['expert_load_max'] == pytest.approx(relative.max(), rel=1e-5)
    assert metrics['expert_load_min'] == pytest.approx(relative.min(), rel=1e-5)
  for plain, with_router in (losses[:2], losses[2:]):
    assert with_router - plain == pytest.approx(0.5 * aux + 0.01 * z, rel=1e-5)
  # One update, however the group is cut into rows and micro-batches.
  for one, other in ((0, 2), (1, 3)):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5), weights[one], weights[other]
    )
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), weights[0], weights[1])
  assert moved['layers']['router']['kernel'] > 1e-3


@pytest.mark.parametrize(
  'mesh',
  [
    pytest.param({'data': 2, 'fsdp': 2, 'tensor': 2}, marks=pytest.mark.slow),
    pytest.param({'expert': 4}, marks=pytest.mark.slow),
    pytest.param({'data': 2, 'tensor': 2, 'expert': 2}, marks=pytest.mark.slow),
    {'fsdp': 4, 'expert': 2},
  ],
)
def test_every_mesh_gives_the_update_of_one_device(mesh, learner, groups):
  plan = RowPlan(shape=RowShape(48, 48), micro_batch_rows=8, max_micro_batches=2)
  one, other = (learner(mesh=sizes, rows=plan, router=COEFS) for sizes in (None, mesh))
  want, got = one.train(groups).result(), other.train(groups).result()
  for name in ('loss', 'grad_norm', 'router_aux', 'expert_load_max', 'router_z'):
    assert got[name] == pytest.approx(want[name], rel=1e-4), name
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), other.snapshot(), one.snapshot()
  )
  kernel = other.params['layers']['experts_gate']['kernel']
  assert kernel.sharding.shard_shape(kernel.shape)[1] == 4 // mesh.get('expert', 1)


def test_dense_models_know_no_router(make_learner, tiny, mixture):
  with pytest.raises(ConfigError, match=r'router_aux_coef=0.5 is for mixtures.*Set it to 0'):
    make_learner(router=COEFS)
  with pytest.raises(ConfigError, match=r'mesh.expert=2 splits experts.*dense'):
    make_learner(mesh={'expert': 2})
  three = make_mesh({'expert': 3}, jax.devices()[:3])
  with pytest.raises(ConfigError, match=r'expert=3 does not divide the 4 experts'):
    check_mixture(mixture, NO_ROUTER_LOSS, three)
  check_mixture(tiny, NO_ROUTER_LOSS, make_mesh({}, jax.devices()[:1]))


def test_rows_without_weights_are_refused(mixture, params):
  rows = PackedBatch(**dict.fromkeys(PackedBatch._fields))
  with pytest.raises(ValueError, match='weigh_places=True'):
    row_states_and_router(params, mixture, rows, ForwardSettings())


def test_load_counts_every_choice_and_hidden_states_stay(learner, mixture, params, groups):
  made = learner()
  params = jax.tree.map(jnp.asarray, params)
  batch, num_micro = made._place(made._pack_to_train(groups)[0])
  load = batch_load(params, mixture, batch, num_micro, ForwardSettings())
  tokens = float(np.asarray(batch.place_weight).sum())
  np.testing.assert_allclose(load.sum(1), mixture.experts_per_token * tokens, rtol=1e-6)
  rows = jax.tree.map(lambda x: x[0], batch)
  plain = row_states(params, mixture, rows, ForwardSettings())
  hidden, sums = row_states_and_router(params, mixture, rows, ForwardSettings())
  np.testing.assert_array_equal(plain, hidden)
  assert sums.load.shape == (mixture.num_layers, mixture.num_experts)
