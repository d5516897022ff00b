"""Functions of whole distributions against a plain log-softmax: values, gradients, tiles, shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlax_stack import sharding
from rlax_stack.pallas_kernels.vocabulary_terms import vocabulary_terms

TEMPERATURE = 0.7


def _function(log_policy, targets, extras):
  """A number, a vector and ids for each token, of the whole distribution."""
  top, ids = jax.lax.top_k(log_policy, 3)
  chosen = jnp.take_along_axis(log_policy, targets[:, None], axis=-1)[:, 0]
  power = jnp.sum(jnp.exp(2.0 * log_policy), axis=-1)
  return {'number': chosen * power + extras['shift'], 'top': top, 'ids': ids}


def _inputs(seed=0, rows=4, count=7, vocab=24, width=8):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.standard_normal((rows, count, width)), jnp.float32)
  head = jnp.asarray(rng.standard_normal((vocab, width)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, vocab, (rows, count)), jnp.int32)
  return hidden, head, targets, {'shift': jnp.asarray(rng.random((rows, count)), jnp.float32)}


@functools.partial(jax.jit, static_argnames=('block', 'mesh'))
def _terms(hidden, head, targets, extras, mask=None, block=None, mesh=None):
  return vocabulary_terms(
    hidden,
    head,
    targets,
    _function,
    extras=extras,
    mask=mask,
    temperature=TEMPERATURE,
    block=block,
    mesh=mesh,
  )


@functools.partial(jax.jit, static_argnames=('block', 'mesh'))
def _grads(hidden, head, targets, extras, mask=None, block=None, mesh=None):
  def total(hidden, head):
    found = _terms(hidden, head, targets, extras, mask, block, mesh)
    return jnp.sum(found['number']) + jnp.sum(found['top'] ** 2)

  return jax.grad(total, (0, 1))(hidden, head)


def _log_policy(hidden, head):
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / TEMPERATURE
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize('block', [1, 3, 7, None])
def test_values_are_those_of_the_whole_distribution(block):
  hidden, head, targets, extras = _inputs()
  found = _terms(hidden, head, targets, extras, block=block)
  policy = _log_policy(hidden, head)
  chosen = np.take_along_axis(policy, np.asarray(targets)[..., None], -1)[..., 0]
  number = chosen * np.exp(2 * policy).sum(-1) + np.asarray(extras['shift'])
  np.testing.assert_allclose(found['number'], number, rtol=2e-5, atol=2e-5)
  np.testing.assert_array_equal(found['ids'], np.argsort(-policy, axis=-1)[..., :3])
  np.testing.assert_allclose(found['top'], -np.sort(-policy, axis=-1)[..., :3], atol=2e-5)
  assert found['ids'].dtype == jnp.int32 and found['top'].shape == (4, 7, 3)


def test_capped_logits_are_divided_by_the_temperature():
  hidden, head, targets, _ = _inputs()
  found = vocabulary_terms(
    hidden, head, targets, lambda p, t, e: p, temperature=TEMPERATURE, soft_cap=1.5
  )
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
  logits = 1.5 * np.tanh(logits / 1.5) / TEMPERATURE
  want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  np.testing.assert_allclose(found, want, atol=2e-6)


def test_gradient_is_that_of_finite_differences():
  hidden, head, targets, extras = _inputs(rows=2, count=3)
  d_hidden, d_head = _grads(hidden, head, targets, extras, block=2)

  def total(hidden, head):
    policy = _log_policy(hidden, head)
    chosen = np.take_along_axis(policy, np.asarray(targets)[..., None], -1)[..., 0]
    top = -np.sort(-policy, axis=-1)[..., :3]
    return (chosen * np.exp(2 * policy).sum(-1)).sum() + (top**2).sum()

  rng = np.random.default_rng(1)
  for got, place in ((d_hidden, 0), (d_head, 1)):
    arrays = [np.asarray(hidden, np.float64), np.asarray(head, np.float64)]
    step = 1e-6 * rng.standard_normal(arrays[place].shape)
    values = []
    for sign in (1, -1):
      moved = list(arrays)
      moved[place] = arrays[place] + sign * step
      values.append(total(*moved))
    assert (np.asarray(got) * step).sum() == pytest.approx((values[0] - values[1]) / 2, rel=1e-3)


def test_masked_nan_reads_and_writes_nothing():
  hidden, head, targets, extras = _inputs()
  mask = jnp.asarray(np.random.default_rng(2).random(targets.shape) < 0.6)
  dirty = jnp.where(mask[..., None], hidden, jnp.nan)
  wild = jnp.where(mask, targets, 2**30)
  found = _terms(dirty, head, wild, extras, mask)
  for name, value in _terms(hidden, head, targets, extras).items():
    kept = np.asarray(mask).reshape(mask.shape + (1,) * (value.ndim - 2))
    np.testing.assert_array_equal(found[name], np.where(kept, value, 0))
  clean = _grads(hidden, head, targets, extras, mask)
  jax.tree.map(np.testing.assert_array_equal, _grads(dirty, head, wild, extras, mask), clean)
  assert not np.asarray(clean[0])[~np.asarray(mask)].any()


def test_products_are_in_the_dtype_of_hidden_and_the_head_keeps_its_own():
  hidden, head, targets, extras = _inputs()
  d_hidden, d_head = _grads(hidden.astype(jnp.bfloat16), head, targets, extras, block=2)
  assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)
  exact = _grads(hidden, head, targets, extras)
  scale = float(np.abs(exact[1]).max())
  np.testing.assert_allclose(d_head, exact[1], atol=2e-2 * scale, rtol=2e-2)


def test_rows_and_vocabulary_over_a_mesh_equal_one_device():
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'tensor': 2}, jax.devices()[:8])
  hidden, head, targets, extras = _inputs()
  rows = NamedSharding(mesh, P(('data', 'fsdp')))
  placed = (
    jax.device_put(hidden, rows),
    jax.device_put(head, NamedSharding(mesh, P('tensor', 'fsdp'))),
    *jax.device_put((targets, extras), rows),
  )
  for block in (2, None):
    got = _terms(*placed, block=block, mesh=mesh)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
      (got, _grads(*placed, block=block, mesh=mesh)),
      (_terms(hidden, head, targets, extras), _grads(hidden, head, targets, extras)),
    )


@pytest.mark.parametrize('sizes', [{}, {'data': 2, 'tensor': 2}], ids=str)
def test_memory_grows_with_the_tile_and_not_with_the_tokens(sizes):
  devices = int(np.prod(list(sizes.values()) or [1]))
  mesh = sharding.make_mesh(sizes, jax.devices()[:devices])
  vocab, width, rows = 4096, 8, 2

  def temporary(count, block):
    inputs = _inputs(rows=rows, count=count, vocab=vocab, width=width)
    lowered = _grads.lower(*inputs, block=block, mesh=mesh)
    compiled = lowered.compile()
    text = compiled.as_text()
    for tokens in (rows * count, count, rows * count // 2):
      assert f'{tokens},{vocab}]' not in text and f'{vocab},{tokens}]' not in text
    return compiled.memory_analysis().temp_size_in_bytes

  few, many = temporary(96, 4), temporary(768, 4)
  logits = 4 * rows * 768 * vocab // devices
  assert many < 0.25 * logits
  assert many - few < 0.05 * logits
  assert temporary(768, 64) > 2 * many


def test_rows_that_do_not_divide_are_refused():
  mesh = sharding.make_mesh({'data': 2}, jax.devices()[:2])
  hidden, head, targets, extras = _inputs(rows=3)
  with pytest.raises(ValueError, match='got 3 rows and 2 shards'):
    vocabulary_terms(hidden, head, targets, _function, extras=extras, mesh=mesh)
