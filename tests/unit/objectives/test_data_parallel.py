"""How many devices share the rows of a batch changes neither loss nor gradient, for any box."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.objectives import metrics
from rlax_stack.objectives.objective import TABLES, resolve

_LISTS = ('corrections', 'regularisers')
# One of each kind of sum over the batch: plain, by group, a cut at a share of it, a state.
_QUICK = ('ppo_clip', 'prompt_mean', 'flat_entropy', 'second_moment_mask', 'kl_cov')


def _has_device_part(slot, box):
  """Advantages of the host alone are numbers like any others here; critics have tests of their own."""
  return slot not in ('shaping', 'critic') and (
    slot != 'advantage' or box.token_advantages is not None
  )


BOXES = [
  pytest.param(slot, name, marks=() if name in _QUICK else pytest.mark.slow)
  for slot, table in TABLES.items()
  for name, box in table.items()
  if _has_device_part(slot, box)
]
_WIDTH = 8


def _evaluate(whole_loss, objective, inputs):
  """Loss, metrics, and the gradient by log-probs, entropies and terms of whole distributions."""
  terms, tree = jax.tree.flatten(inputs.vocabulary)
  places = [i for i, x in enumerate(terms) if jnp.issubdtype(x.dtype, jnp.floating)]

  def loss(log_probs, entropy, *moved):
    values = list(terms)
    for place, value in zip(places, moved, strict=True):
      values[place] = value
    vocabulary = jax.tree.unflatten(tree, values)
    changed = inputs._replace(log_probs_t=log_probs, entropy_t=entropy, vocabulary=vocabulary)
    parts = whole_loss(objective, changed)
    return parts.loss, parts

  at = (inputs.log_probs_t, inputs.entropy_t, *(terms[i] for i in places))
  order = tuple(range(len(at)))
  (value, parts), gradient = jax.value_and_grad(loss, order, has_aux=True)(*at)
  return value, gradient, metrics.finished(parts)


@pytest.mark.parametrize(('slot', 'name'), BOXES)
def test_rows_over_eight_devices_are_rows_on_one(
  slot, name, whole_loss, make_inputs, with_vocabulary
):
  boxes = {'corrections': (), 'max_tokens': 8} | {slot: (name,) if slot in _LISTS else name}
  if 'critic' in TABLES[slot][name].tags:
    boxes['critic'] = 'separate'
  objective = resolve(**boxes)
  inputs = with_vocabulary(objective, make_inputs(seed=4, rows=_WIDTH))
  # Groups of four whose trajectories lie on different devices.
  group = jnp.where(inputs.mask_t, inputs.trajectory_t % 8, -1)
  inputs = inputs._replace(group_t=group)
  assert len(jax.devices()) >= _WIDTH
  mesh = Mesh(np.array(jax.devices()[:_WIDTH]), ('data',))
  rows = NamedSharding(mesh, PartitionSpec(None, 'data'))
  run = functools.partial(_evaluate, whole_loss, objective)
  want = jax.device_get(jax.jit(run)(inputs))
  sharded = jax.device_put(inputs, rows)
  assert len(sharded.log_probs_t.sharding.device_set) == _WIDTH
  got = jax.jit(run, in_shardings=rows)(sharded)
  got = jax.device_get(got)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-7)
  for one, other in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
  assert max(np.abs(gradient).max() for gradient in want[1]) > 0
  for key, value in want[2].items():
    np.testing.assert_allclose(got[2][key], value, rtol=1e-4, atol=1e-5, err_msg=key)
