"""Critic estimators against loops in numpy float64, the golden table, and what they must be equal to."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives import segments, traces
from rlax_stack.objectives.advantages import critic as estimators
from rlax_stack.objectives.boxes import bind
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.loss import prepare
from rlax_stack.objectives.objective import TABLES, resolve
from rlax_stack.objectives.process_rewards import NO_STEPS, Steps

_NAN = float('nan')

# The table of shared/reference/losses.md, section 9: γ = .99, λ = .95, reward on the last valid token.
_MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0]], bool)
_VALUE = np.array(
  [[0.2, 0.1, 0.3, _NAN], [0, 0.1, 0.2, 0.1], [0.5, _NAN, 0.4, 0.6], [0.3, 0.2, _NAN, _NAN]]
)
_REWARD = np.array([1.0, 0.0, 1.0, 0.5])
_GOLDEN = np.array(
  [
    [0.70345667, 0.85535, 0.7, 0],
    [0.01863942, -0.08544452, -0.19505, -0.1],
    [0.4322731, 0, 0.5702, 0.4],
    [0.18015, 0.3, 0, 0],
  ]
)


@pytest.fixture
def make_inputs(make_inputs):
  """As the fixture it takes the place of, with a reward due at every token: rewards of steps."""

  def make(seed=0, masked=0.0, **options):
    inputs = make_inputs(seed=seed, masked=masked, **options)
    due = np.random.default_rng((seed, 2)).standard_normal(inputs.mask_t.shape)
    return inputs._replace(adv_t=jnp.where(inputs.mask_t, due.astype(np.float32), masked))

  return make


def _loop(value, after, rewards, gamma, lam, rho=None, trace=None):
  """Advantage and target of one trajectory, float64, written as the definition: no recursion.

  `rho` and `trace` are the bounded weights of V-trace; ones give GAE.
  """
  n = len(value)
  rho = np.ones(n) if rho is None else rho
  trace = np.ones(n) if trace is None else trace
  following = np.append(value[1:], after)
  error = rho * (rewards + gamma * following - value)
  target = np.array(
    [
      value[t] + sum(gamma ** (k - t) * np.prod(lam * trace[t:k]) * error[k] for k in range(t, n))
      for t in range(n)
    ]
  )
  next_target = np.append(target[1:], after)
  blend = lam * next_target + (1 - lam) * following
  return rewards + gamma * blend - value, target


def _trajectories(inputs):
  """Per trajectory: where its trained tokens are, and what a loop needs, float64."""
  mask, ids = np.asarray(inputs.mask_t), np.asarray(inputs.trajectory_t)
  for index in np.unique(ids[mask]):
    where = mask & (ids == index)
    fields = ('value_t', 'next_value_t', 'adv_t', 'proximal_log_probs_t')
    value, after, reward, proximal = (
      np.asarray(getattr(inputs, name), np.float64)[where] for name in fields
    )
    weight = np.exp(proximal - np.asarray(inputs.behaviour_log_probs_t, np.float64)[where])
    yield where, value, after[-1], reward, weight


def _found(text, inputs, critic='separate'):
  """Advantages and targets that a box makes of a batch, as the loss gets them."""
  objective = resolve(advantage=text, critic=critic, corrections=())
  tokens = prepare(objective, inputs, {}).tokens
  return np.asarray(tokens['adv_t']), np.asarray(tokens['target_t'])


def _assert_is_loop(text, inputs, loop):
  adv, target = _found(text, inputs)
  masked = ~np.asarray(inputs.mask_t)
  assert (adv[masked] == 0).all() and (target[masked] == 0).all()
  for where, *rest in _trajectories(inputs):
    want_adv, want_target = loop(*rest)
    np.testing.assert_allclose(adv[where], want_adv, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(target[where], want_target, rtol=2e-5, atol=2e-6)


def _due_at_the_end():
  """The golden table's rewards, each at the last trained token of its trajectory."""
  due = np.zeros((4, 4))
  for row in range(4):
    due[row, np.flatnonzero(_MASK[row])[-1]] = _REWARD[row]
  return due


def test_gae_is_that_of_the_golden_table(make_inputs):
  following = np.zeros((4, 4))
  for row in range(4):
    places = np.flatnonzero(_MASK[row])
    following[row, places[:-1]] = _VALUE[row, places[1:]]
  shape = (1, 2, 8)  # two trajectories to a row

  def packed(value, dtype=jnp.float32):
    return jnp.asarray(np.broadcast_to(value, (4, 4)).reshape(shape), dtype)

  fields = dict.fromkeys(make_inputs()._fields, packed(0.0)) | {
    'mask_t': packed(_MASK, bool),
    'value_t': packed(_VALUE),
    'next_value_t': packed(following),
    'adv_t': packed(_due_at_the_end()),
    'trajectory_t': packed(np.arange(4)[:, None], jnp.int32),
    'group_t': packed(np.arange(4)[:, None] // 2, jnp.int32),
  }
  inputs = make_inputs()._replace(**fields)
  adv, target = _found('gae(gamma=0.99, lam=0.95, value_lam=0.95)', inputs)
  np.testing.assert_allclose(adv.reshape(4, 4), _GOLDEN, rtol=1e-5, atol=1e-7)
  returns = np.where(_MASK, _GOLDEN + np.nan_to_num(_VALUE), 0.0)
  np.testing.assert_allclose(target.reshape(4, 4), returns, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('masked', [0.0, _NAN])
def test_gae_is_that_of_a_loop(masked, make_inputs):
  def loop(value, after, reward, weight):
    del weight
    adv, _ = _loop(value, after, reward, 0.9, 0.7)
    return adv, _loop(value, after, reward, 0.9, 0.8)[1]

  text = 'gae(gamma=0.9, lam=0.7, value_lam=0.8)'
  _assert_is_loop(text, make_inputs(seed=3, masked=masked), loop)


def test_vtrace_is_that_of_a_loop(make_inputs):
  def loop(value, after, reward, weight):
    rho, trace = np.minimum(weight, 1.1), np.minimum(weight, 0.95)
    return _loop(value, after, reward, 0.9, 0.8, rho, trace)

  text = 'vtrace(gamma=0.9, lam=0.8, absolute_rho_high=1.1, absolute_c_high=0.95)'
  _assert_is_loop(text, make_inputs(seed=4, masked=_NAN, drift=0.4), loop)


def test_vtrace_on_policy_is_gae(make_inputs):
  inputs = make_inputs(seed=5)
  inputs = inputs._replace(proximal_log_probs_t=inputs.behaviour_log_probs_t)
  found = _found('vtrace(gamma=0.95, lam=0.9)', inputs)
  want = _found('gae(gamma=0.95, lam=0.9, value_lam=0.9)', inputs)
  for got, expected in zip(found, want, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_length_adaptive_gae(make_inputs):
  def loop(value, after, reward, weight):
    del weight
    lam = {1: 0.0, 2: 0.0, 3: 1 / 3, 4: 1 / 2}[len(value)]  # max(1 − 2/n, 0)
    return _loop(value, after, reward, 0.9, lam)[0], _loop(value, after, reward, 0.9, 1.0)[1]

  inputs = make_inputs(seed=6)
  assert len({len(value) for _, value, *_ in _trajectories(inputs)}) > 1
  _assert_is_loop('length_adaptive_gae(alpha=0.5, gamma=0.9)', inputs, loop)


def test_undiscounted_gae_is_return_minus_value(make_inputs):
  inputs = make_inputs(seed=7)
  adv, target = _found('gae(gamma=1.0, lam=1.0)', inputs)
  for where, value, after, reward, _ in _trajectories(inputs):
    to_go = np.cumsum(reward[::-1])[::-1] + after
    np.testing.assert_allclose(adv[where], to_go - value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(target[where], to_go, rtol=1e-5, atol=1e-6)


def test_one_step_gae_is_the_temporal_difference(make_inputs):
  inputs = make_inputs(seed=8)
  adv, target = _found('gae(gamma=0.9, lam=0.0, value_lam=0.0)', inputs)
  want = (
    np.asarray(inputs.adv_t) + 0.9 * np.asarray(inputs.next_value_t) - np.asarray(inputs.value_t)
  )
  np.testing.assert_allclose(adv, np.where(inputs.mask_t, want, 0.0), rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(traces.td_errors(inputs, 0.9), want.astype(np.float32))
  np.testing.assert_allclose(target, adv + np.asarray(inputs.value_t), rtol=1e-5, atol=1e-6)


def test_a_cut_off_trajectory_goes_on_and_an_ended_one_does_not(make_inputs):
  inputs = make_inputs(seed=9)
  last = np.asarray(segments.run_end(inputs.mask_t, inputs.trajectory_t))
  ended = inputs._replace(next_value_t=jnp.where(last, 0.0, inputs.next_value_t))
  cut = inputs._replace(next_value_t=jnp.where(last, 2.0, inputs.next_value_t))
  text = 'gae(gamma=0.9, lam=1.0)'
  difference = _found(text, cut)[0] - _found(text, ended)[0]
  for where, value, *_ in _trajectories(inputs):
    steps = np.arange(len(value), 0, -1)
    np.testing.assert_allclose(difference[where], 2.0 * 0.9**steps, rtol=1e-4)


def test_a_trajectory_does_not_see_its_neighbours(make_inputs):
  """Every trajectory alone in a row gives what the packed rows gave."""
  inputs = make_inputs(seed=10)
  for text in ('gae(gamma=0.9)', 'length_adaptive_gae(alpha=0.5)', 'vtrace(lam=0.9)'):
    adv, target = _found(text, inputs)
    for where, *_ in _trajectories(inputs):
      places = np.argwhere(where)
      m, r = places[0, :2]
      columns = places[:, 2]
      alone = inputs._replace(
        **{
          name: jnp.asarray(np.asarray(value)[m, r][columns][None, None])
          for name, value in inputs._asdict().items()
          if name != 'vocabulary'
        }
      )
      one_adv, one_target = _found(text, alone)
      np.testing.assert_allclose(one_adv[0, 0], adv[where], rtol=1e-5, atol=1e-6)
      np.testing.assert_allclose(one_target[0, 0], target[where], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('box', ['gae', 'length_adaptive_gae', 'vtrace'])
@pytest.mark.parametrize(('ddof', 'eps'), [(0, 1e-8), (1, 0.5)])
def test_whitening(box, ddof, eps, make_inputs):
  inputs = make_inputs(seed=11, masked=_NAN)
  plain, targets = _found(box, inputs)
  white, same = _found(f'{box}(whiten=True, ddof={ddof}, eps={eps})', inputs)
  mask = np.asarray(inputs.mask_t)
  tokens = plain[mask].astype(np.float64)
  want = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=ddof) + eps)
  np.testing.assert_allclose(white[mask], want, rtol=2e-5, atol=1e-6)
  assert (white[~mask] == 0).all()
  np.testing.assert_array_equal(same, targets)
  level = jnp.full(mask.shape, 3.0)
  flat = estimators.whitened(level, inputs.mask_t, ddof=ddof, eps=eps)
  np.testing.assert_allclose(flat, 0.0, atol=1e-2)


def test_options_of_the_targets_are_their_own(make_inputs):
  inputs = make_inputs(seed=12)
  base = _found('gae(lam=0.9, value_lam=0.9)', inputs)
  policy = _found('gae(lam=0.5, value_lam=0.9)', inputs)
  value = _found('gae(lam=0.9, value_lam=0.5)', inputs)
  np.testing.assert_array_equal(base[1], policy[1])
  np.testing.assert_array_equal(base[0], value[0])
  assert np.abs(base[0] - policy[0]).max() > 0.01 < np.abs(base[1] - value[1]).max()


def test_sums_to_go_skip_holes_and_stop_at_the_end():
  mask = jnp.array([[True, False, True, True, False, True, False]])
  ids = jnp.array([[4, -1, 4, 7, -1, 7, -1]])
  value = jnp.array([[1.0, _NAN, 10.0, 100.0, _NAN, 1000.0, _NAN]])
  decay = jnp.full((1, 7), 0.5).at[0, 1].set(_NAN)
  got = traces.sum_to_go(value, decay, mask, ids)
  np.testing.assert_array_equal(got, [[6.0, 0, 10.0, 600.0, 0, 1000.0, 0]])
  got = traces.next_of(value, mask, ids)
  np.testing.assert_array_equal(got, [[10.0, 0, 0, 1000.0, 0, 0, 0]])
  ends = segments.run_end(mask, ids)
  np.testing.assert_array_equal(ends, [[False, False, True, False, False, True, False]])


@pytest.mark.parametrize('name', ['gae', 'length_adaptive_gae', 'vtrace'])
def test_rewards_of_steps_fall_due_where_the_steps_end(name, make_reward_batch):
  """What the host hands on is the reward due at each token; without steps all of it at the end."""
  batch = make_reward_batch([1.0, 0.5], [0, 1], [3, 4])
  plain = advantages_of(resolve(advantage=name, critic='separate'), batch)
  np.testing.assert_array_equal(plain.adv_t[0], np.float32([0, 0, 1.0]))
  steps = (Steps(np.array([0, 2]), np.array([0.75, 0.25])), NO_STEPS)
  batch = dataclasses.replace(batch, steps=steps)
  found = advantages_of(resolve(advantage=name, critic='separate'), batch)
  np.testing.assert_array_equal(found.adv_t[0], np.float32([0.75, 0, 0.25]))
  np.testing.assert_array_equal(found.adv_t[1], np.float32([0, 0, 0, 0.5]))


def test_hooks_are_reached_through_their_boxes(make_inputs):
  """The functions behind the boxes are those that the loops above were compared with."""
  inputs = make_inputs(seed=14)
  table = TABLES['advantage']
  adv, target = _found('gae', inputs)
  np.testing.assert_array_equal(estimators.gae_advantages(inputs), adv)
  np.testing.assert_array_equal(estimators.gae_targets(inputs), target)
  adv, target = _found('length_adaptive_gae', inputs)
  np.testing.assert_array_equal(estimators.length_adaptive_advantages(inputs), adv)
  np.testing.assert_array_equal(estimators.return_targets(inputs), target)
  adv, target = _found('vtrace', inputs)
  np.testing.assert_array_equal(estimators.vtrace_advantages(inputs), adv)
  np.testing.assert_array_equal(estimators.vtrace_targets(inputs), target)
  assert bind('vtrace(lam=0.5)', table, 'a').call(table['vtrace'].value_targets, inputs) is not None
