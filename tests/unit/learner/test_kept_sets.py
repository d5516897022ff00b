"""Log-probs within kept sets against dense formulas, in packed rows, on a mesh, and through a training step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import DataError
from rlax_stack.learner import packing
from rlax_stack.learner.kept_sets import kept_log_probs, with_kept_log_probs
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings, row_states, target_log_probs
from rlax_stack.models import decoder
from rlax_stack.objectives.objective import resolve
from rlax_stack.types import KEPT_OVERFLOW

TEMPERATURE = 0.7


def _with_sets(groups, vocabulary, width=6, seed=0):
  """The groups with kept sets of 0 (the whole vocabulary) to `width` words, the token's own among them."""
  rng = np.random.default_rng(seed)

  def one(trajectory):
    kept = np.full((len(trajectory.tokens), width), -1, np.int32)
    for place in np.flatnonzero(trajectory.mask_t):
      token, size = trajectory.tokens[place], rng.integers(0, width + 1)
      others = rng.permutation(np.delete(np.arange(vocabulary), token))
      kept[place, :size] = rng.permutation([token, *others[: size - 1]]) if size else -1
    return dataclasses.replace(trajectory, kept_ids_t=kept)

  return [
    dataclasses.replace(group, trajectories=tuple(one(t) for t in group.trajectories))
    for group in groups
  ]


def _dense(logits, target, kept):
  """The log-prob of a softmax over the kept logits alone, float64."""
  ids = [i for i in kept if i >= 0] or list(range(len(logits)))
  inside = np.asarray(logits, np.float64)[ids]
  return logits[target] - inside.max() - np.log(np.exp(inside - inside.max()).sum())


def test_values_and_gradient_equal_a_softmax_over_the_set():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(5, 11)).astype(np.float32) * 3
  kept = np.array(
    [[4, 2, 7, -1], [-1] * 4, [3, -1, -1, -1], [0, 1, 2, 3], [9, 10, -1, -1]], np.int32
  )
  target = np.array([2, 6, 3, 0, 10], np.int32)
  allowed = np.ones((5, 11), bool)
  for i, ids in enumerate(kept):
    if (ids >= 0).any():
      allowed[i] = np.isin(np.arange(11), ids)

  def ours(x):
    return kept_log_probs(jax.nn.log_softmax(x), target, kept)

  def masked(x):
    log_policy = jax.nn.log_softmax(jnp.where(allowed, x, -jnp.inf))
    return jnp.take_along_axis(log_policy, target[:, None], axis=1)[:, 0]

  want = [_dense(row, t, ids) for row, t, ids in zip(logits, target, kept, strict=True)]
  np.testing.assert_allclose(ours(logits), want, atol=1e-5)
  assert ours(logits)[2] == 0  # the only token there is
  weights = jnp.asarray(rng.normal(size=5).astype(np.float32))
  got = jax.grad(lambda x: jnp.sum(weights * ours(x)))(logits)
  np.testing.assert_allclose(
    got, jax.grad(lambda x: jnp.sum(weights * masked(x)))(logits), atol=1e-5
  )
  assert np.abs(np.asarray(got)[~allowed]).max() < 1e-6  # nothing moves the words outside
  np.testing.assert_array_equal(np.asarray(got)[2], 0)


def test_terms_of_boxes_see_whole_distributions_in_the_same_pass():
  log_policy = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(1).normal(size=(3, 7)), 'f4'))
  target = jnp.asarray([1, 2, 3], jnp.int32)
  kept = jnp.asarray([[1, 2], [-1, -1], [3, -1]], jnp.int32)

  def terms(log_policy, target, proximal):
    return {'slot': {'mass': jnp.exp(log_policy).sum(-1) + proximal['one']}}

  found, log_probs = with_kept_log_probs(terms)(log_policy, target, ({'one': jnp.ones(3)}, kept))
  np.testing.assert_allclose(found['slot']['mass'], 2, rtol=1e-6)
  np.testing.assert_array_equal(log_probs, kept_log_probs(log_policy, target, kept))
  assert with_kept_log_probs(None)(log_policy, target, ({}, None)) == ({}, None)


@pytest.fixture(scope='module')
def groups(make_groups, tiny):
  return _with_sets(make_groups(), tiny.vocab_size)


def _pack(groups, **options):
  advantages = [np.zeros(len(group.trajectories)) for group in groups]
  return packing.pack_groups(groups, advantages, row_shapes=[RowShape(48, 48)], **options)


def test_packed_rows_hold_the_set_of_every_target(groups):
  batch = _pack(groups, rows_multiple=4)
  trajectories = [t for group in groups for t in group.trajectories]
  for index, trajectory in enumerate(trajectories):
    here = batch.mask_t & (batch.trajectory_t == index)
    np.testing.assert_array_equal(batch.kept_ids_t[here], trajectory.kept_ids_t[trajectory.mask_t])
  assert batch.kept_ids_t.shape == (*batch.mask_t.shape, 6)
  assert (batch.kept_ids_t[~batch.mask_t] == -1).all()
  padded = packing.pad_rows(batch, 7)
  assert padded.kept_ids_t.shape[0] == 7 and (padded.kept_ids_t[4:] == -1).all()


def test_sets_of_several_widths_and_none(groups, make_groups):
  first, second, third = groups[0], make_groups()[1], groups[2]
  narrow = [dataclasses.replace(t, kept_ids_t=t.kept_ids_t[:, :2]) for t in third.trajectories]
  third = dataclasses.replace(third, trajectories=tuple(narrow))
  batch = _pack([first, second, third])
  assert batch.kept_ids_t.shape[-1] == 6
  assert (batch.kept_ids_t[batch.group_t == 1] == -1).all()
  assert (batch.kept_ids_t[batch.group_t == 2, 2:] == -1).all()
  assert (batch.kept_ids_t[batch.group_t == 2, :2] >= 0).any()
  bare = _pack(make_groups())
  assert bare.kept_ids_t is None and packing.pad_rows(bare, 3).kept_ids_t is None


def test_tokens_without_a_known_set_are_not_trained(groups):
  group = groups[0]
  trajectory = group.trajectories[0]
  kept = trajectory.kept_ids_t.copy()
  kept[trajectory.mask_t] = [KEPT_OVERFLOW] + [-1] * 5
  full = dataclasses.replace(trajectory, kept_ids_t=kept)
  with pytest.raises(DataError, match='0/0 trains on tokens whose kept sets had no room'):
    _pack([dataclasses.replace(group, trajectories=(full,))])
  left_out = dataclasses.replace(full, mask_t=np.zeros_like(full.mask_t))
  with pytest.raises(DataError, match='every mask_t is empty.*raise config.rollout.kept_tokens'):
    _pack([dataclasses.replace(group, trajectories=(left_out,))])


def test_scores_equal_dense_softmaxes_over_the_sets(tiny, tiny_params, groups):
  rows = jax.tree.map(jnp.asarray, _pack(groups, rows_multiple=2))
  settings = ForwardSettings(temperature=TEMPERATURE)
  scored = target_log_probs(tiny_params, tiny, rows, settings)
  bare = target_log_probs(tiny_params, tiny, rows._replace(kept_ids_t=None), settings)
  hidden = np.asarray(row_states(tiny_params, tiny, rows, settings), np.float64)
  head = np.asarray(decoder.lm_head(tiny_params, tiny), np.float64)
  limited = 0
  for at in zip(*np.nonzero(np.asarray(rows.mask_t)), strict=True):
    logits = hidden[at[0], int(rows.source_index_t[at])] @ head.T / TEMPERATURE
    want = _dense(logits, int(rows.target_t[at]), np.asarray(rows.kept_ids_t[at]))
    assert float(scored.log_prob[at]) == pytest.approx(want, abs=2e-5)
    limited += int(rows.kept_ids_t[at][0]) >= 0
  assert limited > 10
  whole = np.asarray((rows.kept_ids_t < 0).all(-1))
  np.testing.assert_array_equal(
    np.asarray(scored.log_prob)[whole], np.asarray(bare.log_prob)[whole]
  )
  np.testing.assert_array_equal(scored.entropy, bare.entropy)
  assert (np.asarray(scored.log_prob)[~whole] > np.asarray(bare.log_prob)[~whole] - 1e-6).all()


def test_the_gradient_of_all_weights_goes_through_the_set(tiny, tiny_params, groups):
  rows = jax.tree.map(jnp.asarray, _pack(groups[:1]))
  settings = ForwardSettings(temperature=TEMPERATURE)
  kept = np.asarray(rows.kept_ids_t)
  allowed = (kept[..., None] == np.arange(tiny.vocab_size)).any(-2) | (kept < 0).all(-1)[..., None]

  def dense(params):
    hidden = row_states(params, tiny, rows, settings)
    sources = jnp.take_along_axis(hidden, rows.source_index_t[..., None], axis=1)
    logits = sources @ decoder.lm_head(params, tiny).T / TEMPERATURE
    log_policy = jax.nn.log_softmax(jnp.where(allowed, logits, -jnp.inf))
    chosen = jnp.take_along_axis(log_policy, rows.target_t[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(rows.mask_t, chosen, 0.0) ** 2)

  def ours(params):
    return jnp.sum(target_log_probs(params, tiny, rows, settings).log_prob ** 2)

  want, got = (jax.jit(jax.grad(f))(tiny_params) for f in (dense, ours))
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-4 * float(np.abs(other).max()))


def _drawn(learner, groups):
  """The groups with the behaviour log-probs that a sampler of the learner's weights would record."""
  return [
    dataclasses.replace(
      group,
      trajectories=tuple(
        dataclasses.replace(t, behaviour_log_probs_t=score)
        for t, score in zip(group.trajectories, scores, strict=True)
      ),
    )
    for group, scores in zip(groups, learner.score(groups), strict=True)
  ]


def test_training_on_a_mesh_equals_one_device(make_learner, groups):
  """Two updates of the batch, the proximal and the anchor scores and a box of whole distributions among them."""
  objective = resolve(
    corrections=('token_tis',),
    regularisers=('kl_anchor(coef=0.1)', 'peak_entropy(coef=0.5, top_p=0.8)'),
    off_policy=True,
  )
  plan = RowPlan(shape=RowShape(48, 48), micro_batch_rows=4, max_micro_batches=2)
  fields = {'objective': objective, 'updates_per_batch': 2, 'rows': plan}
  mesh = {'data': 2, 'fsdp': 2, 'tensor': 2}
  one, many = make_learner(**fields), make_learner(mesh=mesh, **fields)
  drawn = _drawn(one, groups)
  for _ in range(2):
    want, got = one.train(drawn).result(), many.train(drawn).result()
    assert want['skipped'] == 0 and want['grad_norm'] > 0
    for name in ('loss', 'grad_norm', 'entropy', 'ratio_mean'):
      assert got[name] == pytest.approx(want[name], rel=5e-4, abs=1e-6), name
  assert got['kl_anchor'] > 0


def test_the_ratio_is_one_within_the_sets_and_not_without(make_learner, groups):
  objective = resolve(ratio='token(base="behaviour")', corrections=(), off_policy=True)
  learner = make_learner(objective=objective)
  drawn = _drawn(learner, groups)
  bare = [
    dataclasses.replace(
      g, trajectories=tuple(dataclasses.replace(t, kept_ids_t=None) for t in g.trajectories)
    )
    for g in drawn
  ]
  without = make_learner(objective=objective).train(bare).result()
  found = learner.train(drawn).result()
  assert found['ratio_mean'] == pytest.approx(1, abs=1e-5)
  assert found['ratio_max'] == pytest.approx(1, abs=1e-4)
  assert without['ratio_mean'] < 0.8
