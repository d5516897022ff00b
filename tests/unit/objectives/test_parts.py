"""Segments, metrics, host advantages and shaping, and the hooks that see a whole batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import DataError, RewardError
from rlax_stack.objectives import metrics, ratios, segments
from rlax_stack.objectives.aggregation import masked_mean
from rlax_stack.objectives.boxes import BoundBox, Box
from rlax_stack.objectives.corrections.importance import log_weight
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.inputs import Correction, Statistics, TokenLoss, clean
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.reward_batch import by_group, from_groups, turns
from rlax_stack.objectives.trust_regions.clip import reinforce
from rlax_stack.types import FinishReason, Group, Prompt, Reward, Source, Trajectory


def test_runs_by_hand():
  value = jnp.asarray([[1.0, 2.0, jnp.nan, 4.0, 8.0, 16.0]])
  mask = jnp.asarray([[True, True, False, True, True, False]])
  ids = jnp.asarray([[5, 5, -1, 5, 3, -1]], jnp.int32)
  turn = jnp.asarray([[0, 0, 9, 1, 0, 9]], jnp.int32)
  np.testing.assert_array_equal(segments.run_sum(value, mask, ids), [[7, 7, 0, 7, 8, 0]])
  np.testing.assert_array_equal(segments.run_sum(value, mask, ids, turn), [[3, 3, 0, 4, 8, 0]])
  np.testing.assert_array_equal(segments.run_size(mask, ids), [[3, 3, 0, 3, 1, 0]])
  np.testing.assert_allclose(segments.run_mean(value, mask, ids)[0, :2], 7 / 3, rtol=1e-6)
  assert segments.run_start(mask, ids).tolist() == [[True, False, False, False, True, False]]
  both = jnp.asarray([[0, 0, 0, 1, 1, 1]], jnp.int32)
  np.testing.assert_array_equal(segments.batch_sum(value, mask, both), [[3, 3, 0, 12, 12, 0]])


def test_log_ratio_is_float32_and_exactly_zero_where_masked():
  current = jnp.asarray([-1.0, -2.0, jnp.nan, -jnp.inf], jnp.bfloat16)
  base = jnp.asarray([-1.5, -2.0, -1.0, 0.0], jnp.bfloat16)
  mask = jnp.asarray([True, True, False, False])
  out = ratios.log_ratio(current, base, mask)
  assert out.dtype == jnp.float32
  np.testing.assert_array_equal(out, [0.5, 0.0, 0.0, 0.0])
  assert float(ratios.exp(jnp.float32(200.0))) == pytest.approx(np.exp(20.0), rel=1e-6)


def test_quantiles_of_counts_add_up():
  rng = np.random.default_rng(0)
  log_ratio = jnp.asarray(0.1 * rng.standard_normal((4, 500)), jnp.float32)
  mask = jnp.ones((4, 500), bool)
  whole = metrics.log_ratio_counts(log_ratio, mask)
  parts = sum(metrics.log_ratio_counts(log_ratio[i], mask[i]) for i in range(4))
  np.testing.assert_array_equal(whole, parts)
  for level in (0.01, 0.5, 0.99):
    want = np.quantile(np.asarray(log_ratio), level)
    got = float(jnp.log(metrics.ratio_quantile(whole, level)))
    assert got == pytest.approx(want, rel=0.09, abs=0.005)
  assert float(ratios.Ratio(log_ratio, log_ratio, lambda x: x).ratio_t[0, 0]) == pytest.approx(
    np.exp(float(log_ratio[0, 0])), rel=1e-6
  )
  on_policy = metrics.log_ratio_counts(jnp.zeros((1, 3)), jnp.ones((1, 3), bool))
  assert float(metrics.ratio_quantile(on_policy, 0.5)) == 1.0


def test_by_group_takes_ragged_groups_and_leaves_flat_ones_at_zero(make_reward_batch):
  batch = make_reward_batch([3.0, 0.1, 1.0, 0.1, 0.1], [0, 1, 0, 1, 1])
  np.testing.assert_array_equal(by_group(batch, lambda r: r * 2), [6.0, 0.0, 2.0, 0.0, 0.0])


def test_loss_metrics_carry_no_loss(make_inputs):
  inputs = clean(jax.tree.map(lambda x: x[0], make_inputs()))
  ratio = ratios.token(inputs)
  mask = inputs.mask_t
  trust, correction = reinforce(ratio, inputs), Correction(inputs.adv_t, mask, mask)
  parts = metrics.loss_metrics(inputs, ratio, trust, correction)
  assert float(parts.loss) == 0.0
  assert float(parts.means['truncated_fraction'].numerator) == float(np.asarray(mask).sum())


def test_metrics_by_hand(whole_loss, make_inputs):
  inputs = make_inputs(seed=3, masked=float('nan'))
  objective = resolve(corrections=('icepop(absolute_low=0.9, absolute_high=1.1)',))
  got = {k: float(v) for k, v in metrics.finished(whole_loss(objective, inputs)).items()}
  mask = np.asarray(inputs.mask_t)
  held = clean(inputs)
  rho = np.exp(np.asarray(held.log_probs_t - held.behaviour_log_probs_t, np.float64)[mask])
  weight = np.exp(np.asarray(log_weight(held), np.float64)[mask])
  kept = (weight >= 0.9) & (weight <= 1.1)
  assert got['kept_fraction'] == pytest.approx(kept.mean())
  assert got['truncated_fraction'] == pytest.approx(1 - kept.mean())
  assert got['correction_mean'] == pytest.approx((weight * kept).mean(), rel=1e-5)
  assert got['ess_fraction'] == pytest.approx(weight.mean() ** 2 / (weight**2).mean(), rel=1e-5)
  assert got['kl_behaviour'] == pytest.approx((rho - 1 - np.log(rho)).mean(), rel=1e-4)
  want = (rho * np.log(rho) - rho + 1).mean()
  assert got['kl_behaviour_reverse'] == pytest.approx(want, rel=1e-3)
  fresh = weight[np.asarray(held.staleness_t)[mask] == 0]
  assert 0 < len(fresh) < len(weight)
  assert got['sampler_kl'] == pytest.approx((fresh - 1 - np.log(fresh)).mean(), rel=1e-4)
  assert got['sampler_log_ratio_max'] == pytest.approx(np.abs(np.log(fresh)).max(), rel=1e-5)
  assert got['ratio_p01'] <= got['ratio_p50'] <= got['ratio_p99'] <= got['ratio_max'] * 1.1
  pair = masked_mean(jnp.asarray([1.0, jnp.nan]), jnp.asarray([True, False]))
  assert (float(pair.numerator), float(pair.denominator)) == (1.0, 1.0)


def test_a_batch_of_stale_tokens_says_nothing_of_the_sampler(whole_loss, make_inputs):
  inputs = make_inputs(seed=3)
  stale = inputs._replace(staleness_t=inputs.staleness_t + 1)
  got = metrics.finished(whole_loss(resolve(), stale))
  assert float(got['sampler_kl']) == float(got['sampler_log_ratio_max']) == 0.0
  assert float(got['ess_fraction']) < 1.0


def test_dropped_tokens_stay_in_the_denominator(whole_loss, make_inputs):
  inputs = make_inputs(seed=3)
  loss = whole_loss(resolve(trust_region='none', corrections=('icepop(absolute_high=1)',)), inputs)
  held, weight = clean(inputs), jnp.exp(log_weight(clean(inputs)))
  table = -held.adv_t * jnp.exp(held.log_probs_t - held.proximal_log_probs_t) * weight
  want = jnp.sum(jnp.where(held.mask_t & (weight >= 0.5) & (weight <= 1), table, 0.0))
  assert float(loss.loss) == pytest.approx(
    float(want) / float(np.asarray(held.mask_t).sum()), rel=1e-5
  )


def test_whole_batch_statistics_and_state_reach_the_box(whole_loss, make_inputs):
  """A threshold that only the whole batch knows, a coefficient that the state carries."""

  def statistics(inputs, *, state, scale: float = 2.0):
    worst = jnp.max(jnp.where(inputs.mask_t, jnp.abs(inputs.adv_t), 0.0))
    return Statistics(
      tokens={'share': inputs.adv_t / worst}, scalars={'worst': scale * worst * state}
    )

  def loss(ratio, inputs, *, statistics, state):
    share = statistics.tokens['share'] * statistics.scalars['worst'] * state
    nowhere = jnp.zeros(inputs.mask_t.shape, bool)
    return TokenLoss(-share * ratio.log_ratio_t, nowhere, nowhere, {'probe': share})

  def update(state, found, *, scale: float = 2.0):
    return state + scale * found['probe']

  box = Box(
    loss,
    formula='probe',
    batch_statistics=statistics,
    init_state=lambda: jnp.float32(3.0),
    update_state=update,
  )
  bound = BoundBox('probe', box, (('scale', 4.0),))
  objective = dataclasses.replace(resolve(), trust_region=bound)
  assert objective.needs_scores and not resolve().needs_scores
  assert sorted(objective.device_boxes) == ['advantage', 'ratio', 'trust_region']
  state = objective.init_state()
  assert state == {'trust_region': 3.0}
  inputs = make_inputs(seed=4)
  parts = whole_loss(objective, inputs)
  mean = float(metrics.finished(parts)['probe'])
  held = clean(inputs)
  want = 36 * np.asarray(held.adv_t)[np.asarray(held.mask_t)].mean()
  assert mean == pytest.approx(float(want), rel=1e-4)
  after = objective.update_state(state, metrics.finished(parts))
  assert float(after['trust_region']) == pytest.approx(3.0 + 4.0 * mean, rel=1e-5)


def test_token_advantages_replace_those_of_the_host(whole_loss, make_inputs):
  box = Box(
    lambda batch: batch.reward, formula='A', token_advantages=lambda inputs: inputs.log_probs_t
  )
  objective = dataclasses.replace(
    resolve(trust_region='reinforce'), advantage=BoundBox('probe', box)
  )
  inputs = clean(make_inputs(seed=5))
  loss, gradient = jax.value_and_grad(
    lambda x: whole_loss(objective, inputs._replace(log_probs_t=x)).loss
  )(inputs.log_probs_t)
  count = float(np.asarray(inputs.mask_t).sum())
  assert float(loss) == pytest.approx(-float(jnp.sum(inputs.log_probs_t**2)) / count, rel=1e-5)
  np.testing.assert_allclose(gradient, -inputs.log_probs_t / count, rtol=1e-5)


def _group(values, source, reason=FinishReason.STOP):
  source = np.asarray(source, np.int8)
  trajectories = tuple(
    Trajectory(
      group_id=0, sample_index=i, prompt_id='p', tokens=np.arange(len(source), dtype=np.int32),
      source_t=source, mask_t=source == Source.POLICY,
      behaviour_log_probs_t=np.zeros(len(source), np.float32),
      raw_log_probs_t=np.zeros(len(source), np.float32),
      version_t=np.arange(len(source), dtype=np.int32), finish_reason=reason,
      reward=None if value is None else Reward(value=value),
    )
    for i, value in enumerate(values)
  )  # fmt: skip
  prompt = Prompt(prompt_id='p', messages=(), answer='', metadata={'task': 'sum'})
  return Group(group_id=0, prompt=prompt, prompt_tokens=np.arange(1), trajectories=trajectories)


def test_batch_from_groups_and_turns():
  group = _group([1.0, 0.0], [0, 1, 1, 2, 1, 2, 1, 1], FinishReason.LENGTH)
  batch = from_groups([group, _group([2.0], [0, 1])])
  assert batch.turn_t[0].tolist() == [0, 0, 1, 2, 2] == turns(group.trajectories[0]).tolist()
  assert batch.version_t[0].tolist() == [1, 2, 4, 6, 7]
  assert batch.group.tolist() == [0, 0, 1] and batch.length.tolist() == [5, 5, 1]
  assert batch.truncated.tolist() == [True, True, True][:2] + [False]
  assert batch.metadata[2] == {'task': 'sum'}
  with pytest.raises(DataError, match='group 0 has a trajectory without a reward'):
    from_groups([_group([1.0, None], [0, 1])])
  with pytest.raises(RewardError, match='finite'):
    from_groups([_group([1.0, float('nan')], [0, 1])])


def test_overlong_penalty_of_the_dapo_paper(make_reward_batch):
  objective = resolve(shaping=('overlong_penalty',), max_tokens=20480)
  batch = make_reward_batch([1.0] * 4, [0] * 4, [16384, 18432, 20480, 22528])
  np.testing.assert_allclose(objective.shaping[0](batch).reward, [1.0, 0.5, 0.0, -0.5])


def test_truncated_answers_leave_the_loss_but_not_the_baseline(make_reward_batch):
  objective = resolve(shaping=('mask_truncated',))
  batch = make_reward_batch([1.0, 0.0, 0.5], [0] * 3, truncated=[False, True, False])
  found = advantages_of(objective, batch)
  assert found.keep.tolist() == [True, False, True]
  np.testing.assert_allclose([values[0] for values in found.adv_t], [0.5, -0.5, 0.0])
  # Where nothing would be left the batch stays, with nothing to learn from it.
  none_left = make_reward_batch([1.0, 0.0], [0, 0], truncated=[True, True])
  found = advantages_of(objective, none_left)
  assert found.keep.all() and not any(values.any() for values in found.adv_t)


def test_ratio_is_exactly_one_on_policy_in_bfloat16(whole_loss, make_inputs):
  inputs = make_inputs(seed=6, drift=0.0)
  half = inputs.log_probs_t.astype(jnp.bfloat16)
  inputs = inputs._replace(log_probs_t=half, proximal_log_probs_t=half)
  for name in ('token', 'sequence', 'geometric_mean', 'turn'):
    found = metrics.finished(whole_loss(resolve(ratio=name), inputs))
    assert float(found['ratio_mean']) == float(found['ratio_max']) == 1.0
    assert float(found['ratio_p01']) == float(found['ratio_p99']) == 1.0


def test_clip_sides(whole_loss, make_inputs):
  inputs = make_inputs(seed=7, drift=0.6)
  held = clean(inputs)
  rho = np.exp(np.asarray(held.log_probs_t - held.proximal_log_probs_t))
  adv, mask = np.asarray(held.adv_t), np.asarray(held.mask_t)
  found = metrics.finished(whole_loss(resolve(), inputs))
  low, high = (adv < 0) & (rho < 0.8) & mask, (adv > 0) & (rho > 1.28) & mask
  assert low.any() and high.any()
  assert float(found['clip_low_fraction']) == pytest.approx(low.sum() / mask.sum())
  assert float(found['clip_high_fraction']) == pytest.approx(high.sum() / mask.sum())


def test_without_a_bound_and_on_policy_every_surrogate_is_reinforce(whole_loss, make_inputs):
  inputs = make_inputs(seed=8)
  inputs = inputs._replace(proximal_log_probs_t=inputs.log_probs_t)
  held = clean(inputs)
  want = -np.asarray(held.adv_t) / np.asarray(held.mask_t).sum()
  for name in ('reinforce', 'none', 'ppo_clip', 'dual_clip', 'cispo', 'log_clip'):
    objective = resolve(trust_region=name)
    got = jax.grad(lambda x, o=objective: whole_loss(o, inputs._replace(log_probs_t=x)).loss)(
      inputs.log_probs_t
    )
    np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)


def test_entropy_and_kl_terms_by_hand(whole_loss, make_inputs):
  inputs = make_inputs(seed=9)
  terms = ('kl_anchor(coef=0.5, estimator="k2")', 'entropy_bonus(coef=0.25)')
  mask = np.asarray(inputs.mask_t)
  d = np.asarray(inputs.log_probs_t - inputs.anchor_log_probs_t)[mask]
  want = 0.5 * (d**2 / 2).mean() - 0.25 * np.asarray(inputs.entropy_t)[mask].mean()
  # Their denominator is the trained tokens, whatever the policy loss is divided by.
  for name in ('token_mean', 'sequence_sum'):
    plain = whole_loss(resolve(aggregation=name), inputs)
    both = whole_loss(resolve(aggregation=name, regularisers=terms), inputs)
    np.testing.assert_allclose(both.loss - plain.loss, want, rtol=1e-5)
  assert 'kl_anchor' in both.means and 'kl_anchor' not in plain.means
