"""What holds for every box of every table, so that a new one is covered on arrival."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives.boxes import RESERVED, TAGS, bind, box_options
from rlax_stack.objectives.objective import TABLES, resolve

_ALL = [(slot, name) for slot, table in TABLES.items() for name in table]
_LISTS = ('shaping', 'corrections', 'regularisers')
_DEVICE = [(slot, name) for slot, name in _ALL if slot != 'shaping']
# A mask, a ratio or a loss that steps at a bound has no useful difference there; the seed avoids it.
_STEP = 1e-3


def _rows(x):
  """[2, 2, 9, ...] in another order, as five micro-batches of one longer row."""
  rows = x[::-1, ::-1].reshape(4, 1, 9, *x.shape[3:])
  return jnp.pad(rows, ((0, 1), (0, 0), (0, 3)) + ((0, 0),) * (rows.ndim - 3))


def _objective(slot, name):
  """An objective with this box and plain ones beside it."""
  boxes = {'corrections': (), 'max_tokens': 8} | {slot: (name,) if slot in _LISTS else name}
  if slot == 'critic':
    boxes['advantage'] = 'gae'
  elif 'critic' in TABLES[slot][name].tags:
    boxes['critic'] = 'separate'
  return resolve(**boxes)


def _loss(whole_loss, objective, inputs):
  """Function of log-probs and entropy, the two that carry a gradient."""

  def loss(log_probs, entropy):
    return whole_loss(objective, inputs._replace(log_probs_t=log_probs, entropy_t=entropy)).loss

  return loss


@pytest.mark.parametrize(('slot', 'name'), _ALL)
def test_entry_is_documented_and_its_options_are_named_by_what_they_bound(slot, name):
  box = TABLES[slot][name]
  text = inspect.getdoc(box.function) or ''
  assert re.search(r'https?://\S+', text), 'no link to a paper'
  assert re.search(r'[=∝]', text.split('See "')[0] if 'See "' in text else text), 'no formula'
  assert box.tags <= set(TAGS)
  for option, (_, default) in box_options(box).items():
    assert default is not inspect.Parameter.empty, f'{option} has no default'
    assert re.search(rf'^\s*{option}: ', text, re.M), f'{option} is not described'
    if re.search(r'low|high|clip|cap\b|bound|threshold', option):
      assert option.startswith(('delta', 'absolute')), option
  for part in box.parts:
    names = [
      p.name for p in inspect.signature(part).parameters.values() if p.kind == p.KEYWORD_ONLY
    ]
    assert set(names) <= set(box_options(box)) | set(RESERVED)
  assert (box.init_state is None) == (box.update_state is None)
  assert box.host_state is None or slot in ('shaping', 'advantage')
  assert ('critic' in box.tags) == (box.value_targets is not None)
  bound = bind(name, TABLES[slot], slot, fill={'max_tokens': 8})
  assert bind(bound.text, TABLES[slot], slot) == bound
  assert _objective(slot, name).formula.count('\n') == 0


@pytest.mark.parametrize(('slot', 'name'), _DEVICE)
def test_masked_nan_changes_neither_loss_nor_gradient(
  slot, name, whole_loss, make_inputs, with_vocabulary
):
  objective, found = _objective(slot, name), []

  @jax.jit
  def evaluate(inputs):
    loss = _loss(whole_loss, objective, inputs)
    return jax.value_and_grad(loss, (0, 1))(inputs.log_probs_t, inputs.entropy_t)

  for masked in (0.0, float('nan'), float('inf'), -50.0):
    found.append(evaluate(with_vocabulary(objective, make_inputs(masked=masked), masked)))
  assert np.isfinite(found[0][0])
  for other in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, found[0])
  for gradient in found[0][1]:
    assert (np.asarray(gradient)[~np.asarray(make_inputs().mask_t)] == 0).all()


@pytest.mark.parametrize(('slot', 'name'), _DEVICE)
def test_gradient_is_that_of_finite_differences(
  slot, name, whole_loss, make_inputs, with_vocabulary, monkeypatch
):
  """What is under stop_gradient is recorded once and held while the inputs move."""
  objective = _objective(slot, name)
  inputs = with_vocabulary(objective, make_inputs(seed=1))
  loss = _loss(whole_loss, objective, inputs)
  at = (inputs.log_probs_t, inputs.entropy_t)
  gradients = jax.grad(loss, (0, 1))(*at)
  held, calls = [], [0]

  def record(value):
    held.append(value)
    return value

  def replay(value):
    del value
    calls[0] += 1
    return held[calls[0] - 1]

  monkeypatch.setattr(jax.lax, 'stop_gradient', record)
  loss(*at)
  monkeypatch.setattr(jax.lax, 'stop_gradient', replay)
  for which in (0, 1) if 'entropy_gradient' in objective.tags else (0,):
    for seed in range(2):
      direction = np.random.default_rng(seed).standard_normal(at[0].shape).astype(np.float32)
      direction = jnp.where(inputs.mask_t, jnp.asarray(direction), 0.0)
      values = []
      for sign in (1.0, -1.0):
        calls[0] = 0
        moved = [x + sign * _STEP * direction if i == which else x for i, x in enumerate(at)]
        values.append(float(loss(*moved)))
      want = (values[0] - values[1]) / (2 * _STEP)
      got = float(jnp.sum(gradients[which] * direction))
      assert got == pytest.approx(want, abs=2e-3, rel=5e-3)


@pytest.mark.parametrize(('slot', 'name'), _DEVICE)
def test_loss_does_not_depend_on_rows_and_micro_batches(
  slot, name, whole_loss, make_inputs, with_vocabulary
):
  objective = _objective(slot, name)
  inputs = with_vocabulary(objective, make_inputs(seed=2))
  evaluate = jax.jit(lambda inputs: whole_loss(objective, inputs))
  want = evaluate(inputs)
  got = evaluate(jax.tree.map(_rows, inputs))
  np.testing.assert_allclose(got.loss, want.loss, rtol=2e-5, atol=1e-7)
  for key, pair in want.means.items():
    np.testing.assert_allclose(
      got.means[key].numerator, pair.numerator, rtol=2e-5, atol=1e-5, err_msg=key
    )
  np.testing.assert_array_equal(got.histograms['ratio'], want.histograms['ratio'])
