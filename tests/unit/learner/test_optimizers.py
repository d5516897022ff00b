"""Optimizers other than AdamW: by hand or by a loop over layers, on a mesh, and through a checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.learner import directions
from rlax_stack.learner.checkpoint import Checkpointer, load_checkpoint_params
from rlax_stack.learner.optimizer import (
  OPTIMIZERS,
  OptimizerSettings,
  make_optimizer,
  scaled_update,
)
from rlax_stack.learner.state import abstract_state, init_state, state_shardings
from rlax_stack.learner.train_step import _accumulate
from rlax_stack.objectives.inputs import LossParts
from rlax_stack.sharding import make_mesh


def _draw(seed, like):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), like)


def _settings(name, **changes):
  return OptimizerSettings(name=name, learning_rate=0.1, max_grad_norm=1e9, **changes)


def _updates(settings, params, gradients):
  """The update of the last of several gradients."""
  state = make_optimizer(settings).init(params)
  step = jax.jit(lambda g, s, p: scaled_update(settings, g, s, p))
  for gradient in gradients:
    updates, state = step(gradient, state, params)
  return updates, state


_SHAPES = {
  'embedder': {'embedding': (64, 16)},
  'layers': {
    'q_proj': {'kernel': (3, 24, 16), 'bias': (3, 24)},
    'down_proj': {'kernel': (3, 16, 32)},
    'attn_norm': {'scale': (3, 16)},
  },
}


@pytest.fixture(scope='module')
def params():
  shapes = jax.tree.map(np.empty, _SHAPES, is_leaf=lambda x: isinstance(x, tuple))
  return _draw(0, shapes)


def _newton_schulz(matrix):
  """Five quintic steps in float64 on one matrix, as its authors give them."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = matrix / (np.linalg.norm(matrix) + 1e-8)
  for _ in range(5):
    square = x @ x.T
    x = a * x + (b * square + c * square @ square) @ x
  return x


def test_muon_is_a_loop_over_layers_and_matrices(params):
  gradients = [_draw(seed, params) for seed in (1, 2)]
  updates, _ = _updates(_settings('muon', momentum=0.9), params, gradients)
  for name in ('q_proj', 'down_proj'):
    first, second = (g['layers'][name]['kernel'].astype(np.float64) for g in gradients)
    for layer in range(3):
      momentum = 0.1 * (0.9 * first[layer] + second[layer])
      nesterov = 0.9 * momentum / (1 - 0.9**3) + 0.1 * second[layer] / (1 - 0.9**2)
      want = -0.1 * 0.2 * max(nesterov.shape) ** 0.5 * _newton_schulz(nesterov)
      got = np.asarray(updates['layers'][name]['kernel'][layer])
      np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())
      # Its singular values are near 1 before scaling: no direction is left out.
      values = np.linalg.svd(got / (0.02 * max(got.shape) ** 0.5), compute_uv=False)
      assert 0.5 < values.min() and values.max() < 1.3
  adam, _ = _updates(_settings('adamw'), params, gradients)
  for path in (
    ('embedder', 'embedding'),
    ('layers', 'attn_norm', 'scale'),
    ('layers', 'q_proj', 'bias'),
  ):
    got, want = updates, adam
    for key in path:
      got, want = got[key], want[key]
    np.testing.assert_array_equal(got, want)


def _adafactor_by_hand(gradients):
  """Update of one matrix [out, in] by rows and columns, float64; learning rate 0.1."""
  row = col = 0.0
  for step, g in enumerate(gradients):
    decay = 1.0 - (step + 1.0) ** -0.8
    square = g.astype(np.float64) ** 2 + 1e-30
    row = decay * row + (1 - decay) * square.mean(1)
    col = decay * col + (1 - decay) * square.mean(0)
  update = g / np.sqrt(np.outer(row, col) / row.mean())
  return -0.1 * update / max(1.0, np.sqrt(np.mean(update**2)))


def test_adafactor_factors_each_layer_by_itself():
  # Three layers of different sizes of gradient: what is shared between them would show.
  like = {'layers': {'up_proj': {'kernel': np.empty((3, 144, 128))}}}
  gradients = [_draw(seed, like) for seed in (1, 2)]
  for g in gradients:
    g['layers']['up_proj']['kernel'] *= np.float32([[[1.0]], [[30.0]], [[0.01]]])
  params = jax.tree.map(np.zeros_like, gradients[0])
  updates, state = _updates(_settings('adafactor'), params, gradients)
  for layer in range(3):
    want = _adafactor_by_hand([g['layers']['up_proj']['kernel'][layer] for g in gradients])
    got = np.asarray(updates['layers']['up_proj']['kernel'][layer])
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=1e-4)
  held = sum(x.size for x in jax.tree.leaves(state))
  assert held < 3 * (144 + 128) + 20  # no moment of the size of the parameters


def test_per_layer_keeps_layers_apart_and_does_without_them(params):
  clip = directions.per_layer(optax.clip_by_block_rms(1.0))
  updates, _ = clip.update(params, clip.init(params), params)
  kernel = params['layers']['q_proj']['kernel'] * np.float32([[[1.0]], [[1.0]], [[9.0]]])
  scaled = params | {'layers': {'q_proj': {'kernel': kernel}}}
  rest, found = (
    clip.update(x, clip.init(x), x)[0] for x in ({'embedder': params['embedder']}, scaled)
  )
  for layer in range(3):
    want = kernel[layer] / max(1.0, np.sqrt(np.mean(kernel[layer] ** 2)))
    np.testing.assert_allclose(found['layers']['q_proj']['kernel'][layer], want, rtol=1e-5)
  np.testing.assert_array_equal(rest['embedder']['embedding'], updates['embedder']['embedding'])


def test_lion_and_sgd_by_hand(params):
  first, second = (_draw(seed, params) for seed in (1, 2))
  lion, _ = _updates(_settings('lion', b1=0.9, b2=0.8), params, [first, second])
  sgd, _ = _updates(_settings('sgd', momentum=0.5), params, [first, second])
  plain, state = _updates(_settings('sgd', momentum=0.0), params, [first, second])
  a, b = (x['embedder']['embedding'] for x in (first, second))
  np.testing.assert_array_equal(
    lion['embedder']['embedding'], -np.float32(0.1) * np.sign(0.9 * 0.2 * a + 0.1 * b)
  )
  np.testing.assert_allclose(
    sgd['embedder']['embedding'], -0.1 * (0.5 * a + b), rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(plain['embedder']['embedding'], -0.1 * b, rtol=1e-6)
  assert all(x.ndim == 0 for x in jax.tree.leaves(state))


def test_schedule_free_keeps_the_weighted_mean_of_its_iterates(params):
  settings = _settings('schedule_free', b1=0.9, b2=0.5, eps=1e-3, warmup_steps=2)
  transform, rates = make_optimizer(settings), (0.05, 0.1, 0.1)
  state, now = transform.init(params), params
  step = jax.jit(lambda g, s, p, scale: scaled_update(settings, g, s, p, scale))
  z = mean = params['embedder']['embedding'].astype(np.float64)
  nu = total = 0.0
  for seed, rate in enumerate(rates):
    gradient = _draw(seed, params)
    updates, state = step(gradient, state, now, jnp.float32(0.5))
    now = optax.apply_updates(now, updates)
    g = gradient['embedder']['embedding'].astype(np.float64)
    nu = 0.5 * nu + 0.5 * g * g
    z = z - 0.5 * rate * g / (np.sqrt(nu / (1 - 0.5 ** (seed + 1))) + 1e-3)
    total += rate**2
    mean = mean + rate**2 / total * (z - mean)
  found = directions.schedule_free_state(state)
  got = directions.averaged_weights(found, now)['embedder']['embedding']
  np.testing.assert_allclose(got, mean, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    now['embedder']['embedding'], 0.1 * z + 0.9 * mean, rtol=1e-5, atol=1e-5
  )
  assert directions.schedule_free_state(make_optimizer(_settings('adamw')).init(params)) is None


_MESH = {'data': 2, 'fsdp': 2, 'tensor': 2}


def _stepped(settings, params, mesh, gradients):
  """State after updates on a mesh, its arrays where `state_shardings` wants them."""
  transform = make_optimizer(settings)
  state = init_state(params, transform, mesh)
  places = state_shardings(state, mesh)
  step = jax.jit(
    lambda g, s, p: scaled_update(settings, g, s, p),
    out_shardings=(places.params, places.opt_state),
  )
  for gradient in gradients:
    placed = jax.tree.map(jax.device_put, gradient, places.params)
    updates, opt_state = step(placed, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state._replace(params=params, opt_state=opt_state)
  return state


@pytest.mark.parametrize(
  ('name', 'changes'),
  [('muon', {'state_dtype': 'bfloat16'}), ('adafactor', {}), ('schedule_free', {})],
)
def test_the_state_lies_on_the_mesh_and_goes_to_another(name, changes, tiny_params, tmp_path):
  settings = _settings(name, **changes)
  params = {k: v for k, v in tiny_params.items() if k != 'layers'}
  params['layers'] = {k: tiny_params['layers'][k] for k in ('q_proj', 'down_proj', 'attn_norm')}
  if name == 'adafactor':  # large enough to be factored, and square: rows and columns look alike
    params['layers']['up_proj'] = {'kernel': np.ones((2, 128, 128), np.float32)}
  gradients = [_draw(seed, params) for seed in (1, 2)]
  one, eight = make_mesh({}, jax.devices()[:1]), make_mesh(_MESH)
  alone, spread = (_stepped(settings, params, mesh, gradients) for mesh in (one, eight))
  for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
    if a.dtype != jnp.bfloat16:  # those may round to the other neighbour
      np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4)
  statistics = [x for x in jax.tree.leaves(spread.opt_state) if x.ndim >= 2]
  assert sum(not x.sharding.is_fully_replicated for x in statistics) > len(statistics) / 3
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, spread, {})
  target = abstract_state(params, make_optimizer(settings), one)
  restored = checkpointer.restore_latest(target).state
  checkpointer.close()
  for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(spread), strict=True):
    assert a.dtype == b.dtype and a.sharding.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_schedule_free_run_goes_on_bit_for_bit_and_its_average_is_exported(
  tmp_path, make_learner, make_groups, settings
):
  changes = {'name': 'schedule_free', 'state_dtype': 'bfloat16', 'gradient_dtype': 'bfloat16'}
  fields = {'optimizer': dataclasses.replace(settings.optimizer, eps=1e-2, **changes)}
  batches = [make_groups(seed=seed) for seed in range(3)]
  whole, first, second = (make_learner(**fields) for _ in range(3))
  for batch in batches:
    whole.train(batch)
  for batch in batches[:2]:
    first.train(batch)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.warm_up(first.state)
  checkpointer.save(2, first.state, {})
  checkpointer.wait()
  second.restore(checkpointer.restore_latest(second.abstract_state()).state)
  checkpointer.close()
  exported = load_checkpoint_params(tmp_path)
  for a, b, y in zip(
    *(jax.tree.leaves(x) for x in (exported, first.snapshot(), first.params)), strict=True
  ):
    np.testing.assert_array_equal(a, np.asarray(b))
    assert (a != np.asarray(y)).any()
  second.train(batches[2])
  for a, b in zip(jax.tree.leaves(second.state), jax.tree.leaves(whole.state), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_gradients_are_summed_in_the_dtype_asked_for():
  pieces = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)

  def part(weights, index):
    loss = jnp.sum(weights * jnp.asarray(pieces)[index])
    return loss, (LossParts(loss=loss, means={}, maxima={}, histograms={}), None)

  def total(dtype):
    count, weights = jnp.int32(3), jnp.ones(32)
    return jax.jit(lambda: _accumulate(part, weights, num_micro=count, dtype=dtype))().gradient

  want = np.zeros(32, jnp.bfloat16)
  for piece in pieces[:3]:
    want = (want.astype(np.float32) + piece).astype(jnp.bfloat16)
  half = total(jnp.bfloat16)
  assert half.dtype == jnp.float32
  np.testing.assert_array_equal(half, want.astype(np.float32))
  np.testing.assert_allclose(total(jnp.float32), pieces[:3].sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'name': 'muom'}, "unknown optimizer 'muom'. Did you mean muon?"),
    ({'state_dtype': 'float16'}, "unknown dtype 'float16'"),
    ({'name': 'schedule_free', 'b1': 0.0}, 'schedule_free needs b1 above 0'),
  ],
)
def test_bad_names(changes, message):
  with pytest.raises(ConfigError, match=message):
    OptimizerSettings(learning_rate=1.0, **changes)
  assert 'adamw' in OPTIMIZERS
