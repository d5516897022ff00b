"""Laws of the objectives beyond the golden values: ties, ragged groups, errors, metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError, RewardError
from rlax_stack.objectives import advantages, aggregation, corrections, kl, loss, trust_region


def test_equal_rewards_give_exactly_zero():
  for estimator in advantages.ESTIMATORS:
    got = advantages.group_advantages([0.1] * 3, estimator=estimator)
    assert got.dtype == np.float32
    assert (got == 0).all()


def test_ragged_groups_in_any_order():
  rewards, groups = [1.0, 0.0, 3.0, 0.0, 0.0], [7, 2, 7, 7, 2]
  got = advantages.batch_advantages(rewards, groups, estimator='center')
  np.testing.assert_allclose(got, [-1 / 3, 0, 5 / 3, -4 / 3, 0], rtol=1e-6)


@pytest.mark.parametrize('rewards', [[], [1.0]])
@pytest.mark.parametrize('estimator', advantages.ESTIMATORS)
def test_group_of_one_is_refused(rewards, estimator):
  with pytest.raises(ConfigError, match='at least 2 samples per group, got'):
    advantages.group_advantages(rewards, estimator=estimator)


def test_other_advantage_errors():
  with pytest.raises(RewardError, match='finite'):
    advantages.group_advantages([1.0, float('nan')], estimator='center')
  with pytest.raises(ConfigError, match='center'):
    advantages.group_advantages([1.0, 2.0], estimator='centre')
  with pytest.raises(ConfigError, match='one group index per reward'):
    advantages.batch_advantages([1.0, 2.0], [0], estimator='center')


def test_unknown_names_are_refused():
  zeros, mask = jnp.zeros(2), jnp.ones(2, bool)
  with pytest.raises(ConfigError, match='k3_plus'):
    kl.kl_estimate(zeros, zeros, mask, estimator='k4')
  with pytest.raises(ConfigError, match='token_mean'):
    aggregation.token_weights(mask, jnp.zeros(2, jnp.int32), aggregation='mean', num_trajectories=1)


def test_ratio_is_exactly_one_on_policy_in_bfloat16():
  log_probs = jnp.asarray([-0.1, -7.3, -30.0], jnp.bfloat16)
  mask = jnp.ones(3, bool)
  out = trust_region.ppo_clip(log_probs, log_probs, jnp.ones(3), mask)
  assert out.ratio_t.dtype == jnp.float32
  assert (out.ratio_t == 1.0).all()


def test_clip_sides():
  ratios = jnp.asarray([0.7, 0.7, 1.5, 1.5], jnp.float32)
  adv = jnp.asarray([1.0, -1.0, 1.0, -1.0], jnp.float32)
  out = trust_region.ppo_clip(jnp.log(ratios), jnp.zeros(4), adv, jnp.ones(4, bool))
  assert out.clipped_low_t.tolist() == [False, True, False, False]
  assert out.clipped_high_t.tolist() == [False, False, True, False]
  np.testing.assert_allclose(out.loss_t, [-0.7, 0.8, -1.28, 1.5], rtol=1e-6)


def test_correction_truncates_and_counts():
  proximal = jnp.log(jnp.asarray([3.0, 1.5, 9.0], jnp.float32))
  mask = jnp.asarray([True, True, False])
  out = corrections.token_truncated_importance(proximal, jnp.zeros(3), mask, cap=2.0)
  np.testing.assert_allclose(out.weight_t, [2.0, 1.5, 1.0], rtol=1e-6)
  assert out.truncated_t.tolist() == [True, False, False]
  gradient = jax.grad(
    lambda p: corrections.token_truncated_importance(p, jnp.zeros(3), mask).weight_t.sum()
  )(proximal)
  assert (gradient == 0).all()


def test_weights_count_a_sequence_over_all_its_rows():
  mask = jnp.asarray([[True, True, False], [True, False, False]])
  ids = jnp.asarray([[0, 1, -1], [0, -1, -1]], jnp.int32)
  weight = aggregation.token_weights(mask, ids, aggregation='sequence_mean', num_trajectories=4)
  np.testing.assert_array_equal(weight, [[0.5, 1.0, 0.0], [0.5, 0.0, 0.0]])
  assert float(aggregation.weighted_mean(jnp.full((2, 3), jnp.nan), 0 * weight).numerator) == 0.0


def _inputs(size, key):
  a, b, c, d, e = jax.random.split(key, 5)
  mask = jnp.arange(size) % 3 != 0
  return loss.LossInputs(
    log_probs_t=-jax.random.exponential(a, (size,)),
    entropy_t=jax.random.exponential(b, (size,)),
    proximal_log_probs_t=-jax.random.exponential(c, (size,)),
    behaviour_log_probs_t=-jax.random.exponential(d, (size,)),
    anchor_log_probs_t=-jax.random.exponential(e, (size,)),
    adv_t=jax.random.normal(b, (size,)),
    mask_t=mask,
    weight_t=mask.astype(jnp.float32),
  )


def test_parts_with_global_denominators_sum_to_the_whole():
  inputs = _inputs(12, jax.random.key(0))
  denominators = loss.Denominators(jnp.float32(8), jnp.float32(8))
  settings = {'correction_cap': 2.0, 'kl_coef': 0.1, 'entropy_coef': 0.01}
  whole = loss.policy_loss(inputs, denominators, **settings)
  parts = [
    loss.policy_loss(jax.tree.map(lambda x, s=s: x[s], inputs), denominators, **settings)
    for s in (slice(0, 5), slice(5, 12))
  ]
  np.testing.assert_allclose(sum(p.loss for p in parts), whole.loss, rtol=1e-6)
  for name, pair in whole.metrics.items():
    np.testing.assert_allclose(
      sum(p.metrics[name].numerator for p in parts), pair.numerator, rtol=1e-5, err_msg=name
    )
  assert float(whole.ratio_max) == max(float(p.ratio_max) for p in parts)


def test_entropy_and_kl_terms_by_hand():
  inputs = _inputs(6, jax.random.key(1))
  denominators = loss.Denominators(jnp.float32(4), jnp.float32(4))
  base = loss.policy_loss(inputs, denominators)
  both = loss.policy_loss(inputs, denominators, kl_coef=0.5, kl_estimator='k2', entropy_coef=0.25)
  mask = np.asarray(inputs.mask_t)
  d = np.asarray(inputs.log_probs_t - inputs.anchor_log_probs_t)[mask]
  extra = 0.5 * (d**2 / 2).sum() / 4 - 0.25 * np.asarray(inputs.entropy_t)[mask].sum() / 4
  np.testing.assert_allclose(both.loss - base.loss, extra, rtol=1e-5)
  assert 'kl_anchor' in both.metrics and 'kl_anchor' not in base.metrics
