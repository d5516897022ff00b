"""The learner sends tokens through the experts that the rollout recorded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import DataError
from rlax_stack.learner import critic as critics
from rlax_stack.learner import packing
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.scoring import ForwardSettings, row_states_and_router
from rlax_stack.models import decoder
from rlax_stack.objectives.objective import resolve
from rlax_stack.rollout.prefill import causal_attention

_LAYERS, _CHOSEN, _EXPERTS = 2, 2, 4


@pytest.fixture(scope='module')
def mixture(tiny):
  return dataclasses.replace(
    tiny, num_experts=_EXPERTS, experts_per_token=_CHOSEN, moe_intermediate_size=16
  )


@pytest.fixture(scope='module')
def params(mixture):
  rng = np.random.default_rng(1)

  def draw(path, leaf):
    scale = 1.0 if path[-1].key == 'scale' else 0.4 * rng.standard_normal(leaf.shape)
    return np.broadcast_to(scale, leaf.shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(mixture))


def _routed(tokens, seed):
  """Experts of each token by what came before it and `seed`: shared tokens have the same ones."""
  found = np.empty((len(tokens), _LAYERS, _CHOSEN), np.int16)
  for i in range(len(tokens)):
    rng = np.random.default_rng([seed, *tokens[: i + 1].tolist()])
    found[i] = [rng.permutation(_EXPERTS)[:_CHOSEN] for _ in range(_LAYERS)]
  found[-1] = -1
  return found


def _with_experts(groups, seed=0):
  def one(group):
    trajectories = tuple(
      dataclasses.replace(t, experts_t=_routed(t.tokens, seed)) for t in group.trajectories
    )
    return dataclasses.replace(group, trajectories=trajectories)

  return [one(group) for group in groups]


@pytest.fixture(scope='module')
def groups(make_groups):
  return make_groups()


@pytest.fixture(scope='module')
def recorded(groups):
  return _with_experts(groups)


def _pack(groups, pack=packing.pack_groups, length=64):
  zeros = [np.zeros(len(group.trajectories)) for group in groups]
  return pack(groups, zeros, row_shapes=[RowShape(length, 48)], rows_multiple=2, weigh_places=True)


@pytest.mark.parametrize('length', [24, 64])
@pytest.mark.parametrize('pack', [packing.pack_groups, packing.pack_separate])
def test_every_place_has_the_experts_of_its_token(pack, length, recorded):
  batch = _pack(recorded, pack, length)
  assert batch.experts.shape == (*batch.tokens.shape, _LAYERS, _CHOSEN)
  assert batch.experts.dtype == np.int16
  for row in range(len(batch.tokens)):
    # A place's context is what sees it: rebuild each place's prefix from the row.
    ends = batch.subtree_end[row]
    for place in np.flatnonzero(batch.place_weight[row]):
      before = [j for j in range(place) if ends[j] > place]
      prefix = batch.tokens[row, [*before, place]]
      want = _routed(np.append(prefix, 0), 0)[-2]
      np.testing.assert_array_equal(batch.experts[row, place], want)
  assert (batch.experts[batch.place_weight == 0] == -1).all()
  padded = packing.pad_rows(batch, len(batch.tokens) + 2).experts
  assert (padded[-2:] == -1).all() and padded.dtype == np.int16


def test_the_first_record_of_a_shared_place_is_taken(groups):
  first, second, *rest = groups[0].trajectories
  marked = (
    dataclasses.replace(first, experts_t=None),
    dataclasses.replace(second, experts_t=np.full((len(second.tokens), 2, 2), 1, np.int16)),
    *(dataclasses.replace(t, experts_t=np.full((len(t.tokens), 2, 2), 2, np.int16)) for t in rest),
  )
  batch = _pack([dataclasses.replace(groups[0], trajectories=marked)])
  prompt, lengths = len(groups[0].prompt_tokens), [len(t.tokens) for t in marked]
  values = batch.experts[0, :, 0, 0]
  assert (values[:prompt] == 1).all()  # of the second: the first has none
  own = [length - prompt - 1 for length in lengths]
  assert [(values == v).sum() - (prompt if v == 1 else 0) for v in (1, 2)] == [own[1], sum(own[2:])]
  assert _pack(groups).experts is None and packing.pad_rows(_pack(groups), 6).experts is None


def test_experts_of_another_model_are_refused(recorded, make_learner, mixture, params):
  odd = dataclasses.replace(
    recorded[0].trajectories[0],
    experts_t=np.zeros((len(recorded[0].trajectories[0].tokens), 3, 2), np.int16),
  )
  mixed = dataclasses.replace(recorded[0], trajectories=(odd, *recorded[0].trajectories[1:]))
  with pytest.raises(DataError, match='models of different shapes'):
    _pack([mixed])
  one = [dataclasses.replace(recorded[0], trajectories=(odd, odd))]
  with pytest.raises(DataError, match=r'experts of \(3, 2\) .*this model has \(2, 2\)'):
    make_learner(config=mixture, params=params).train(one)
  with pytest.raises(DataError, match=r'this model has \(2, 0\)'):
    make_learner().train(recorded)


@functools.partial(jax.jit, static_argnums=1)
def _alone(params, config, tokens, experts):
  """Log-probs [T, V] and experts [L, T, k] of one sequence in a row of its own."""
  hidden, (_, chosen) = decoder.hidden_states_and_aux(
    params,
    config,
    tokens[None],
    jnp.arange(len(tokens), dtype=jnp.int32)[None],
    lambda q, k, v: (causal_attention(q, k, v), None),
    observe=lambda routing: routing.experts[0],
    replay=jnp.moveaxis(experts, 1, 0)[:, None],
  )
  return jax.nn.log_softmax(hidden[0] @ decoder.lm_head(params, config).T), chosen


def _padded(trajectory, experts):
  tokens, routed = np.zeros(16, np.int32), np.full((16, _LAYERS, _CHOSEN), -1, np.int16)
  tokens[: len(trajectory.tokens)], routed[: len(experts)] = trajectory.tokens, experts
  return tokens, routed


@pytest.fixture(scope='module')
def learner(make_learner, mixture, params):
  """With an anchor."""
  objective = resolve(corrections=(), regularisers=('kl_anchor(coef=0.1)',))
  return make_learner(config=mixture, params=params, objective=objective)


def test_scores_are_those_of_the_recorded_experts(learner, recorded, groups, mixture, params):
  replayed, free = learner.score(recorded), learner.score(groups)
  for group, scores, own in zip(recorded, replayed, free, strict=True):
    for trajectory, score, by_itself in zip(group.trajectories, scores, own, strict=True):
      at = np.flatnonzero(trajectory.mask_t)
      inputs = _padded(trajectory, trajectory.experts_t)
      log_probs, chosen = _alone(params, mixture, *inputs)
      want = np.asarray(log_probs)[at - 1, trajectory.tokens[at]]
      np.testing.assert_allclose(score[at], want, atol=2e-5)
      assert np.abs(score - by_itself)[at].max() > 1e-3
      last = len(trajectory.tokens) - 1
      went = np.asarray(chosen)[:, :last].swapaxes(0, 1)
      np.testing.assert_array_equal(went, trajectory.experts_t[:last])


def test_a_perturbed_learner_goes_the_recorded_way_and_its_router_learns(groups, mixture, params):
  """What one model recorded, another one replays; by itself it chooses otherwise."""

  def own(trajectory):
    free = np.full((1, _LAYERS, _CHOSEN), -1, np.int16)
    chosen = _alone(params, mixture, *_padded(trajectory, free))[1]
    return np.asarray(chosen).swapaxes(0, 1)[: len(trajectory.tokens)].astype(np.int16)

  drawn = [
    dataclasses.replace(
      group,
      trajectories=tuple(dataclasses.replace(t, experts_t=own(t)) for t in group.trajectories),
    )
    for group in groups
  ]
  rows = jax.tree.map(jnp.asarray, _pack(drawn))
  counted = np.zeros((_LAYERS, _EXPERTS))
  for row, place in np.argwhere(np.asarray(rows.place_weight) > 0):
    for layer in range(_LAYERS):
      for expert in np.asarray(rows.experts)[row, place, layer]:
        counted[layer, expert] += rows.place_weight[row, place]
  given = jax.tree.map(jnp.asarray, params)
  layers = given['layers']
  noise = np.random.default_rng(4).standard_normal(layers['router']['kernel'].shape)
  router = layers['router']['kernel'] + 0.3 * jnp.asarray(noise, jnp.float32)

  @jax.jit
  def run(router, rows):
    def loss(router):
      moved = given | {'layers': layers | {'router': {'kernel': router}}}
      hidden, sums = row_states_and_router(moved, mixture, rows, ForwardSettings())
      return jnp.sum(jnp.sin(hidden) * rows.place_weight[..., None]), sums.load

    return jax.value_and_grad(loss, has_aux=True)(router)

  (_, load), gradient = run(router, rows)
  np.testing.assert_allclose(load, counted, rtol=1e-6)
  for layer in range(_LAYERS):
    # No token changes its way, so the loss is smooth in the router of every layer.
    step = jnp.zeros_like(gradient).at[layer].set(1e-2 * jnp.sign(gradient[layer]))
    ends = [float(run(router + sign * step, rows)[0][0]) for sign in (1.0, -1.0)]
    slope = float(jnp.sum(gradient * step))
    assert ends[0] - ends[1] == pytest.approx(2 * slope, rel=0.05) and slope > 1e-2
  (_, free), _ = run(router, rows._replace(experts=None))
  assert np.abs(np.asarray(free) - counted).max() >= 1
  (_, same), _ = run(layers['router']['kernel'], rows._replace(experts=None))
  np.testing.assert_allclose(same, counted, rtol=1e-6)


def test_the_anchor_is_not_replayed_and_the_policy_is(learner, recorded):
  """Current weights and anchor are the same, so they differ by the way of the tokens alone."""
  before = learner.snapshot()['layers']['router']['kernel']
  metrics = learner.train(recorded).result()
  assert metrics['kl_anchor'] > 1e-4 and metrics['skipped'] == 0
  # Experts were drawn with equal chances: half of two choices among four are the likeliest.
  assert metrics['router_strayed'] == pytest.approx(0.5, abs=0.15)
  moved = np.abs(before - learner.snapshot()['layers']['router']['kernel'])
  assert (moved.max(axis=(1, 2)) > 0).all()


def test_a_critic_of_its_own_routes_by_itself(recorded, mixture, params):
  settings = resolve(critic='separate', advantage='gae()', corrections=()).critic_settings
  own = critics.init_params(settings, jax.tree.map(jnp.asarray, params))
  own['value_head'] = {'kernel': own['value_head']['kernel'] + 1, 'bias': jnp.zeros(1, jnp.float32)}
  rows = jax.tree.map(jnp.asarray, _pack(recorded[:1]))
  run = jax.jit(
    lambda rows: critics.row_values(settings, own, None, mixture, rows, ForwardSettings())
  )
  np.testing.assert_array_equal(run(rows), run(rows._replace(experts=None)))
