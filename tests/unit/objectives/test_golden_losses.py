"""Values and gradients of whole objectives against constants of the float64 script beside it.

A name that is also a recipe's holds the boxes of that recipe, some with bounds tight enough to bite.
"""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.inputs import LossInputs
from rlax_stack.objectives.objective import resolve

_SCRIPT = runpy.run_path(str(pathlib.Path(__file__).with_name('golden_losses.py')))
_MASK = _SCRIPT['MASK']

# value, then the gradient over the 12 valid tokens in row order
_GOLDEN = {
  'grpo': """+0.02475645 -0.06512 -0.04365 -0.05893 +0.03618 +0.05966 +0.03999
    +0.07286 +0.00000 -0.03950 -0.06512 +0.00000 +0.08839""",
  'dapo': """+0.03657327 -0.06512 -0.04365 -0.05893 +0.04824 +0.07954 +0.05332
    +0.09715 +0.00000 -0.03950 -0.06512 +0.00000 +0.05893""",
  'prompt_mean': """+0.00598384 -0.05582 -0.03742 -0.05051 +0.04135 +0.06818 +0.04570
    +0.08327 +0.00000 -0.04740 -0.07815 +0.00000 +0.07071""",
  'dr_grpo': """+0.04026293 -0.03454 -0.02315 -0.03125 +0.02559 +0.04218 +0.02828
    +0.05152 +0.00000 -0.01047 -0.01727 +0.00000 +0.01562""",
  'sequence_sum': """+0.12386192 -0.19537 -0.13096 -0.17678 +0.14473 +0.23862 +0.15995
    +0.29146 +0.00000 -0.11850 -0.19537 +0.00000 +0.17678""",
  'dual_clip': """+0.02780980 -0.06512 -0.04365 -0.05893 +0.04824 +0.07954 +0.05332
    +0.00000 +0.00000 -0.03950 -0.06512 +0.00000 +0.05893""",
  'gspo': """+0.01126889 -0.05513 -0.05513 -0.05513 +0.05008 +0.05008 +0.05008
    +0.05008 -0.06092 -0.06092 -0.06092 +0.00000 +0.00000""",
  'gspo_narrow': """+0.03481461 -0.05513 -0.05513 -0.05513 +0.05008 +0.05008 +0.05008
    +0.05008 +0.00000 +0.00000 +0.00000 +0.00000 +0.00000""",
  'cispo': """-0.09348705 -0.06512 -0.04365 -0.05893 +0.04824 +0.07542 +0.05332
    +0.07542 -0.07542 -0.03950 -0.06512 +0.04365 +0.05893""",
  'cispo_two_sided': """-0.08029655 -0.06512 -0.04714 -0.05893 +0.04824 +0.07542 +0.05332
    +0.07542 -0.07542 -0.04714 -0.06512 +0.04714 +0.05893""",
  'gmpo': """+0.00734388 -0.05513 -0.05513 -0.05513 +0.05008 +0.05008 +0.05008
    +0.05008 +0.00000 -0.05992 -0.05992 +0.07608 +0.07608""",
  'gmpo_narrow': """+0.03330624 -0.05513 -0.05513 -0.05513 +0.00000 +0.05071 +0.05071
    +0.05071 +0.00000 -0.05605 -0.05605 +0.00000 +0.08200""",
  'bypass': """+0.05051805 -0.06195 -0.05332 -0.06195 +0.04824 +0.07197 +0.08791
    +0.09715 +0.00000 -0.04365 -0.05893 +0.00000 +0.05332""",
  'decoupled': """+0.05419655 -0.06195 -0.05332 -0.06195 +0.04824 +0.07197 +0.08791
    +0.09715 +0.00000 -0.04365 -0.05893 +0.00000 +0.05332""",
  'decoupled_ppo': """+0.03120593 -0.06195 -0.05238 -0.06195 +0.04824 +0.07197 +0.06398
    +0.09715 +0.00000 -0.04365 -0.05893 +0.00000 +0.05332""",
  'icepop': """-0.03370994 -0.06195 -0.05332 -0.06195 +0.04824 +0.07197 +0.00000
    +0.09715 +0.00000 -0.04365 -0.05893 +0.00000 +0.05332""",
  'sequence_tis': """+0.05737145 -0.07815 -0.05238 -0.07071 +0.05789 +0.09545 +0.06398
    +0.11658 +0.00000 -0.03757 -0.06195 +0.00000 +0.05332""",
  'rloo': """-0.31250000 -0.25000 -0.25000 -0.25000 +0.25000 +0.25000 +0.25000
    +0.25000 -0.12500 -0.12500 -0.12500 +0.12500 +0.12500""",
  'unbounded': """+0.02060411 -0.06512 -0.04365 -0.05893 +0.04824 +0.07954 +0.05332
    +0.09715 -0.08791 -0.03950 -0.06512 +0.04365 +0.05893""",
  'k1': """-0.07500000 +0.08333 +0.08333 +0.08333 +0.08333 +0.08333 +0.08333
    +0.08333 +0.08333 +0.08333 +0.08333 +0.08333 +0.08333""",
  'k2': """+0.02458333 +0.00833 -0.00833 +0.00833 +0.00833 +0.00000 -0.02500
    +0.00833 +0.00833 -0.01667 +0.00000 -0.05000 -0.01667""",
  'k3': """+0.02867843 +0.00793 -0.00876 +0.00793 +0.00793 +0.00000 -0.02915
    +0.00793 +0.00793 -0.01845 +0.00000 -0.06851 -0.01845""",
  'k3_plus': """+0.02867843 +0.00833 -0.00833 +0.00833 +0.00833 +0.00000 -0.02500
    +0.00833 +0.00833 -0.01667 +0.00000 -0.05000 -0.01667""",
}

_ADVANTAGES = {
  'group_center': [0.5, -0.5, 0.25, -0.25],
  'group_std': [0.70710578, -0.70710578, 0.70710478, -0.70710478],
  'group_std(ddof=0)': [0.999998, -0.999998, 0.999996, -0.999996],
  'group_std(eps=1e-4)': [0.7070068, -0.7070068, 0.70690684, -0.70690684],
  'leave_one_out': [1.0, -1.0, 0.5, -0.5],
  'group_center_batch_std': [1.04446375, -1.04446375, 0.52223188, -0.52223188],
  'batch_whiten': [0.78334782, -1.30557969, 0.78334782, -0.26111594],
}

_CLIP = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
_GSPO = {'ratio': 'sequence', 'aggregation': 'sequence_mean'}
_GMPO = {'ratio': 'geometric_mean', 'aggregation': 'sequence_mean'}
_BOXES = {
  'grpo': {'trust_region': _CLIP, 'aggregation': 'sequence_mean'},
  'dapo': {},
  'prompt_mean': {'aggregation': 'prompt_mean'},
  'dr_grpo': {'advantage': 'group_center', 'trust_region': _CLIP, 'aggregation': 'constant_norm'},
  'sequence_sum': {'trust_region': _CLIP, 'aggregation': 'sequence_sum'},
  'dual_clip': {'trust_region': 'dual_clip(absolute_high=1.5)'},
  'gspo': {'trust_region': 'ppo_clip(delta_low=0.1, delta_high=0.1)'} | _GSPO,
  'gspo_narrow': {'trust_region': 'ppo_clip(delta_low=3e-4, delta_high=4e-4)'} | _GSPO,
  'cispo': {'trust_region': 'cispo'},
  'cispo_two_sided': {'trust_region': 'cispo(delta_low=0.2)'},
  'gmpo': {'trust_region': 'log_clip(delta_log_low=0.35, delta_log_high=0.35)'} | _GMPO,
  'gmpo_narrow': {'trust_region': 'log_clip(delta_log_low=0.15, delta_log_high=0.15)'} | _GMPO,
  'bypass': {'ratio': 'token(base="behaviour")'},
  'decoupled': {'corrections': ('token_tis(absolute_high=1e9)',)},
  'decoupled_ppo': {'corrections': ('token_tis(absolute_high=1.2)',)},
  'icepop': {'corrections': ('icepop(absolute_low=0.8, absolute_high=1.3)',)},
  'sequence_tis': {'corrections': ('sequence_tis(absolute_high=1.2)',)},
  'rloo': {
    'advantage': 'leave_one_out',
    'trust_region': 'reinforce',
    'aggregation': 'sequence_sum',
  },
  'unbounded': {'trust_region': 'none'},
}
_KL_ESTIMATORS = ('k1', 'k2', 'k3', 'k3_plus')


def _inputs(current, adv, masked):
  """LossInputs of the script's tables, with `masked` where the mask is off."""

  def table(name):
    return jnp.asarray(np.where(_MASK, _SCRIPT[name], masked), jnp.float32)[None]

  rows = jnp.asarray(np.where(_MASK, np.arange(4)[:, None], -1), jnp.int32)[None]
  nothing = jnp.full((1, 4, 4), masked, jnp.float32)
  return LossInputs(
    log_probs_t=current[None],
    entropy_t=nothing,
    proximal_log_probs_t=table('PROXIMAL'),
    behaviour_log_probs_t=table('BEHAVIOUR'),
    anchor_log_probs_t=table('ANCHOR'),
    adv_t=jnp.asarray(np.where(_MASK, adv[:, None], masked), jnp.float32)[None],
    reward_t=nothing,
    mask_t=jnp.asarray(_MASK)[None],
    weight_t=nothing,
    trajectory_t=rows,
    group_t=rows // 2,
    turn_t=rows * 0,
    version_t=rows * 0,
    staleness_t=rows * 0,
  )


@pytest.fixture(scope='module')
def batch(make_reward_batch):
  return make_reward_batch(_SCRIPT['REWARDS'], _SCRIPT['GROUPS'], _SCRIPT['N'])


@pytest.fixture(scope='module')
def evaluate(batch, whole_loss):
  """Function (name, masked) -> value and gradient [4, 4] of the objective of that name."""

  def loss(current, name, masked):
    if name in _KL_ESTIMATORS:
      term = f'kl_anchor(coef=1, estimator={name!r})'
      objective = resolve(corrections=(), regularisers=(term,))
      adv = np.zeros(4)
    else:
      boxes = {'advantage': 'group_std', 'corrections': (), 'max_tokens': 4} | _BOXES[name]
      objective = resolve(**boxes)
      adv = np.array([values[0] for values in advantages_of(objective, batch).adv_t])
    return whole_loss(objective, _inputs(current, adv, masked)).loss

  def run(name, masked=-50.0):
    current = jnp.asarray(np.where(_MASK, _SCRIPT['CURRENT'], masked), jnp.float32)
    return jax.jit(jax.value_and_grad(lambda c: loss(c, name, masked)))(current)

  return run


def _golden(name):
  numbers = np.array(_GOLDEN[name].split(), np.float64)
  return numbers[0], numbers[1:]


@pytest.mark.parametrize('masked', [-50.0, float('nan')])
@pytest.mark.parametrize('name', sorted(_GOLDEN))
def test_value_and_gradient(name, masked, evaluate):
  value, gradient = evaluate(name, masked)
  want_value, want_gradient = _golden(name)
  assert float(value) == pytest.approx(want_value, abs=2e-7)
  np.testing.assert_allclose(np.asarray(gradient)[_MASK], want_gradient, atol=6e-6)
  assert (np.asarray(gradient)[~_MASK] == 0).all()


@pytest.mark.parametrize('name', sorted(_GOLDEN))
def test_constants_are_what_the_script_says(name):
  value, gradient = _SCRIPT['value_and_gradient'](_SCRIPT['LOSSES'][name])
  want_value, want_gradient = _golden(name)
  assert value == pytest.approx(want_value, abs=6e-9)
  np.testing.assert_allclose(gradient, want_gradient, atol=6e-6)


@pytest.mark.parametrize('name', sorted(_ADVANTAGES))
def test_advantages(name, batch):
  found = advantages_of(resolve(advantage=name), batch)
  got = [float(values[0]) for values in found.adv_t]
  np.testing.assert_allclose(got, _ADVANTAGES[name], atol=1e-7)
  np.testing.assert_allclose(got, _SCRIPT['advantages'](name), atol=1e-7)


def test_decoupled_equals_bypass_where_nothing_is_clipped(whole_loss):
  current = jnp.asarray(_SCRIPT['CURRENT'], jnp.float32)
  adv = np.array([0.5, -0.5, 0.25, -0.25])

  def of(**boxes):
    objective = resolve(trust_region='none', **boxes)
    return jax.value_and_grad(lambda c: whole_loss(objective, _inputs(c, adv, 0.0)).loss)(current)

  decoupled = of(corrections=('token_tis(absolute_high=1e9)',))
  bypass = of(ratio='token(base="behaviour")', corrections=())
  np.testing.assert_allclose(decoupled[0], bypass[0], rtol=1e-6)
  np.testing.assert_allclose(decoupled[1], bypass[1], rtol=1e-5)
