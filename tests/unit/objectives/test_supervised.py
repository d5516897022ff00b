"""Surrogates that read rewards as labels: values and gradients of numpy float64, and identities.

The tables are those of golden_losses.py, where every group of two has one right answer.
"""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives.inputs import LossInputs, clean
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.trust_regions import supervised

_SCRIPT = runpy.run_path(str(pathlib.Path(__file__).with_name('golden_losses.py')))
_MASK, _PROXIMAL, _GROUPS = _SCRIPT['MASK'], _SCRIPT['PROXIMAL'], _SCRIPT['GROUPS']
_RIGHT = _SCRIPT['REWARDS'] >= 0.75


def _nft(floor, factor):
  def loss(current, held):
    def implicit(log_probs):
      return (1 - 0.5 * np.exp(_SCRIPT['log_of'](log_probs, _PROXIMAL))) / 0.5

    floored = implicit(current) + np.maximum(implicit(held), floor) - implicit(held)
    right = -_SCRIPT['log_of'](current, _PROXIMAL)
    table = np.where(_RIGHT[:, None], right, -0.5 * np.log(floored))
    return _SCRIPT['aggregate'](factor * table, 'constant_norm')

  return loss


def _pacs(current, held):
  del held
  score = 1.5 * _SCRIPT['log_of'](current, _PROXIMAL).sum(1)
  total = 0.0
  for i in range(4):
    (other,) = np.nonzero((_GROUPS == _GROUPS[i]) & (np.arange(4) != i))[0]
    chance = 1 / (1 + np.exp(-(score[i] - score[other])))
    total -= np.log(chance if _RIGHT[i] else 1 - chance)
  return total / 4


_NFT = 'nft(correct_at=0.75, negative_weight=0.5, absolute_low={}, prompt_weight={!r})'
_CASES = {
  'nft': (_nft(1.0, 0.5), _NFT.format(1.0, 'linear'), 'constant_norm'),
  'nft(equal)': (_nft(0.1, 1.0), _NFT.format(0.1, 'equal'), 'constant_norm'),
  'pacs': (_pacs, 'pacs(beta=1.5, correct_at=0.75)', 'sequence_mean'),
}


def _inputs(current):
  def table(value):
    return jnp.asarray(np.where(_MASK, value, np.nan), jnp.float32)[None]

  rows = jnp.asarray(np.where(_MASK, np.arange(4)[:, None], -1), jnp.int32)[None]
  fields = dict.fromkeys(LossInputs._fields, table(0.0))
  fields |= dict.fromkeys(('turn_t', 'version_t', 'staleness_t'), rows * 0)
  return LossInputs(**fields)._replace(
    log_probs_t=jnp.where(_MASK, current, jnp.nan)[None],
    proximal_log_probs_t=table(_PROXIMAL),
    reward_t=table(_SCRIPT['REWARDS'][:, None]),
    mask_t=jnp.asarray(_MASK)[None],
    trajectory_t=rows,
    group_t=rows // 2,
    vocabulary={},
  )


@pytest.mark.parametrize('name', sorted(_CASES))
def test_value_and_gradient(name, whole_loss):
  loss, box, aggregation = _CASES[name]
  objective = resolve(trust_region=box, aggregation=aggregation, corrections=(), max_tokens=4)

  @jax.jit
  def evaluate(current):
    return jax.value_and_grad(lambda x: whole_loss(objective, _inputs(x)).loss)(current)

  value, gradient = evaluate(jnp.asarray(_SCRIPT['CURRENT'], jnp.float32))
  want_value, want_gradient = _SCRIPT['value_and_gradient'](loss)
  assert float(value) == pytest.approx(want_value, abs=3e-7)
  np.testing.assert_allclose(np.asarray(gradient)[_MASK], want_gradient, atol=6e-6)


def _groups_of_four(inputs):
  """The inputs with two groups of four, on policy, of which one and three answers are right."""
  right = jnp.asarray([1, 0, 0, 0, 1, 0, 1, 1], jnp.float32)
  ids = jnp.maximum(inputs.trajectory_t, 0)
  rate = jnp.asarray([0.25, 0.75])[ids // 4]
  inputs = inputs._replace(
    group_t=jnp.where(inputs.mask_t, ids // 4, -1),
    proximal_log_probs_t=inputs.log_probs_t,
    reward_t=right[ids],
    adv_t=(right[ids] - rate) / jnp.sqrt(rate * (1 - rate)),
  )
  return inputs, rate


def _gradient(whole_loss, inputs, **boxes):
  objective = resolve(corrections=(), **boxes)
  return jax.grad(lambda x: whole_loss(objective, inputs._replace(log_probs_t=x)).loss)(
    inputs.log_probs_t
  )


def test_nft_is_grpo_on_policy(whole_loss, make_inputs):
  """Theorem 4.2 of the paper, with the standard deviation of the population."""
  inputs, rate = _groups_of_four(make_inputs(seed=3))
  want = _gradient(whole_loss, inputs, trust_region='reinforce')
  got = _gradient(whole_loss, inputs, trust_region='nft(prompt_weight="root")')
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)
  found = supervised.success_rates(clean(inputs)).tokens['rate']
  np.testing.assert_allclose(found[inputs.mask_t], rate[inputs.mask_t], rtol=1e-6)


def test_groups_without_both_kinds_teach_nft_nothing(whole_loss, make_inputs):
  inputs = make_inputs(seed=4)
  for reward in (0.0, 1.0):
    flat = inputs._replace(reward_t=jnp.full_like(inputs.reward_t, reward))
    assert not np.asarray(_gradient(whole_loss, flat, trust_region='nft')).any()


def test_pacs_on_policy_moves_each_answer_by_its_balanced_error(whole_loss, make_inputs):
  """All scores are 0, so every answer is thought right with chance 1/2."""
  inputs, rate = _groups_of_four(make_inputs(seed=5))
  right = np.asarray(inputs.reward_t)
  share = np.where(right > 0, rate, 1 - rate)
  for balanced in (True, False):
    tokens = supervised.cross_entropies(
      clean(inputs), ratio=resolve().ratio(clean(inputs)), balanced=balanced
    ).tokens
    weight = 0.5 / share if balanced else np.ones_like(share)
    mask = np.asarray(inputs.mask_t)
    np.testing.assert_allclose(tokens['loss'][mask], (weight * np.log(2))[mask], rtol=1e-5)
    error = weight * (0.5 - right)
    total = np.where(right > 0, 4 * rate, 4 - 4 * rate) * error  # of the own kind
    other = np.where(right > 0, 4 - 4 * rate, 4 * rate)
    other_weight = 0.5 / (1 - share) if balanced else np.ones_like(share)
    total = total + other * other_weight * (right - 0.5)
    want = error - (total - error) / 3
    np.testing.assert_allclose(tokens['slope'][mask], want[mask], rtol=1e-4, atol=1e-6)
