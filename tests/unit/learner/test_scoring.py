"""Scores of packed rows against separate sequences and a plain log-softmax; the shardings around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rlax_stack.learner import packing
from rlax_stack.learner.optimizer import OptimizerSettings, make_optimizer
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.scoring import (
  ForwardSettings,
  make_proximal_score,
  make_score,
  micro_batch,
  rows_sharding,
  target_log_probs,
)
from rlax_stack.learner.state import init_state, state_shardings, updates_applied
from rlax_stack.learner.step_clock import StepClock, StepMetrics
from rlax_stack.learner.train_step import make_train_step
from rlax_stack.models import decoder
from rlax_stack.objectives.objective import resolve
from rlax_stack.sharding import make_mesh

TEMPERATURE = 0.7
SETTINGS = ForwardSettings(temperature=TEMPERATURE)


def _causal(q, k, v):
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum('rthd,rshd->rhts', q, k) * q.shape[-1] ** -0.5
  seen = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))[None, None]
  return jnp.einsum('rhts,rshd->rthd', jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)


def _separate(params, config, trajectory):
  """Log-prob and entropy (float64) of each trained token of one sequence, alone in its row."""
  tokens = jnp.asarray(trajectory.tokens)[None]
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  hidden = decoder.hidden_states(
    params, config, tokens, positions, _causal, compute_dtype=jnp.float32
  )
  head = np.asarray(decoder.lm_head(params, config), np.float64)
  logits = np.asarray(hidden[0], np.float64) @ head.T / TEMPERATURE
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  at = np.flatnonzero(trajectory.mask_t)
  entropy = -(np.exp(log_p) * log_p).sum(-1)
  return log_p[at - 1, trajectory.tokens[at]], entropy[at - 1]


@pytest.fixture(scope='module')
def packed(make_groups):
  groups = make_groups(sizes=(2, 2), prompt_lengths=(4, 3))
  advantages = [np.zeros(len(group.trajectories)) for group in groups]
  shape = RowShape(32, 24)
  batch = packing.pack_groups(groups, advantages, row_shapes=[shape], rows_multiple=2)
  return groups, batch


def test_target_log_probs_equal_separate_sequences(tiny, tiny_params, packed):
  groups, batch = packed
  scored = target_log_probs(tiny_params, tiny, jax.tree.map(jnp.asarray, batch), SETTINGS)
  trajectories = [t for group in groups for t in group.trajectories]
  for index, trajectory in enumerate(trajectories):
    here = batch.mask_t & (batch.trajectory_t == index)
    log_probs, entropy = _separate(tiny_params, tiny, trajectory)
    np.testing.assert_allclose(np.asarray(scored.log_prob)[here], log_probs, atol=2e-5)
    np.testing.assert_allclose(np.asarray(scored.entropy)[here], entropy, atol=2e-5)


def test_make_score_leaves_unused_micro_batches_at_zero(tiny, tiny_params, packed):
  _, batch = packed
  mesh = make_mesh({'data': 2}, jax.devices()[:2])
  stacked = jax.tree.map(lambda x: np.stack([x, x]), batch)
  scores = make_score(tiny, mesh, SETTINGS)(tiny_params, stacked, np.int32(1))
  want = target_log_probs(tiny_params, tiny, jax.tree.map(jnp.asarray, batch), SETTINGS)
  np.testing.assert_allclose(
    np.asarray(scores[0])[batch.mask_t], np.asarray(want.log_prob)[batch.mask_t], atol=2e-5
  )
  np.testing.assert_array_equal(np.asarray(scores[0])[~batch.mask_t], 0)
  np.testing.assert_array_equal(scores[1], 0)


def test_proximal_scores_are_put_in_the_batch(tiny, tiny_params, packed):
  _, batch = packed
  mesh = make_mesh({'data': 2}, jax.devices()[:2])
  stacked = jax.tree.map(lambda x: np.stack([x, x]), batch)
  with_proximal = make_proximal_score(tiny, mesh, SETTINGS, resolve(regularisers=('lp_reg',)))
  found = with_proximal(tiny_params, stacked, np.int32(2))
  want = make_score(tiny, mesh, SETTINGS)(tiny_params, stacked, np.int32(2))
  np.testing.assert_array_equal(found.proximal_log_probs_t, want)
  proxy = found.proximal_vocabulary['regularisers/0']
  kept = np.asarray(proxy['kept']) > 0
  assert (
    kept.any() and (np.asarray(proxy['log_proxy'])[kept] >= np.asarray(want)[kept] - 1e-5).all()
  )
  np.testing.assert_array_equal(found.adv_t, stacked.adv_t)


def test_micro_batch_takes_one_entry_of_every_leaf():
  batch = {'a': jnp.arange(6).reshape(3, 2), 'b': jnp.arange(3)}
  part = micro_batch(batch, jnp.int32(2))
  np.testing.assert_array_equal(part['a'], [4, 5])
  assert int(part['b']) == 2


def test_shardings_of_rows_and_state(tiny_params):
  mesh = make_mesh({'data': 2, 'fsdp': 2}, jax.devices()[:4])
  assert rows_sharding(mesh).spec == P(None, ('data', 'fsdp', 'expert'))
  state = init_state(tiny_params, make_optimizer(OptimizerSettings(learning_rate=1e-3)), mesh)
  shardings = state_shardings(state, mesh)
  assert shardings.version.spec == P()
  moments = [x for x in jax.tree.leaves(shardings.opt_state) if x.spec != P()]
  split = [x for x in jax.tree.leaves(shardings.params) if x.spec != P()]
  assert len(moments) == 2 * len(split) > 0
  assert int(updates_applied(state)) == 0
  skipped = state._replace(step=jnp.int32(7), skipped=jnp.int32(2))
  assert int(updates_applied(skipped)) == 5


def test_one_train_step_is_shared_by_equal_arguments(tiny):
  mesh = make_mesh({}, jax.devices()[:1])

  def make(learning_rate):
    optimizer = OptimizerSettings(learning_rate=learning_rate)
    return make_train_step(tiny, mesh, forward=SETTINGS, objective=resolve(), optimizer=optimizer)

  assert make(1e-3) is make(1e-3)
  assert make(1e-3) is not make(2e-3)


def test_step_metrics_join_device_and_host():
  metrics = StepMetrics({'loss': jnp.float32(0.5)}, {'tokens': 3.0}, StepClock())
  assert metrics.result() == {'loss': 0.5, 'tokens': 3.0}


def test_kernels_that_are_absent_are_refused(packed, tiny, tiny_params):
  settings = ForwardSettings(kernels='pallas')
  with pytest.raises(ValueError, match="'pallas' of tree attention is absent: it is for TPU"):
    target_log_probs(tiny_params, tiny, packed[1], settings)
