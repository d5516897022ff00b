import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import rlax_stack.pallas_kernels.fused_log_prob as fused_log_prob_module
from rlax_stack import sharding
from rlax_stack.pallas_kernels import fused_log_prob_tpu
from rlax_stack.pallas_kernels.fused_log_prob import FusedLogProb, fused_log_prob

_WEIGHTS = (1.0, -0.3, 0.2)  # of log_prob, entropy and lse in the scalar that is differentiated


def _inputs(count=37, width=16, vocab=101, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(count, width)), dtype)
  head = jnp.asarray(rng.normal(size=(vocab, width)), dtype)
  return hidden, head, jnp.asarray(rng.integers(0, vocab, count), jnp.int32)


_score = jax.jit(fused_log_prob, static_argnames=('chunk_size', 'soft_cap', 'top_k'))


@functools.partial(jax.jit, static_argnames='soft_cap')
def _naive(hidden, head, targets, temperature=1.0, soft_cap=None):
  logits = (hidden @ head.T).astype(jnp.float32)
  if soft_cap is not None:
    logits = soft_cap * jnp.tanh(logits / soft_cap)
  logits = logits / temperature
  log_p = jax.nn.log_softmax(logits)
  entropy = -(jnp.exp(log_p) * log_p).sum(-1)
  chosen = jnp.take_along_axis(log_p, targets[:, None], 1)[:, 0]
  return FusedLogProb(chosen, entropy, jax.nn.logsumexp(logits, -1))


@functools.partial(jax.jit, static_argnames=('score', 'chunk_size', 'soft_cap'))
def _grads(hidden, head, targets, *, score=fused_log_prob, **kwargs):
  per_row = jnp.linspace(0.5, 1.5, hidden.shape[0])

  def scalar(hidden, head):
    out = score(hidden, head, targets, **kwargs)
    return sum(weight * (per_row * x).sum() for weight, x in zip(_WEIGHTS, out[:3], strict=True))

  return jax.grad(scalar, (0, 1))(hidden, head)


@pytest.mark.parametrize('temperature', [1.0, 0.7])
@pytest.mark.parametrize('chunk_size', [None, 8])
def test_values_equal_numpy_float64(temperature, chunk_size):
  hidden, head, targets = _inputs()
  out = _score(hidden, head, targets, temperature=temperature, chunk_size=chunk_size)
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
  lse = np.log(np.exp(logits).sum(-1))
  log_p = logits - lse[:, None]
  np.testing.assert_allclose(out.log_prob, log_p[np.arange(37), targets], atol=2e-6, rtol=1e-6)
  np.testing.assert_allclose(out.entropy, -(np.exp(log_p) * log_p).sum(-1), atol=2e-6, rtol=1e-6)
  np.testing.assert_allclose(out.lse, lse, rtol=1e-6)
  assert all(x.dtype == jnp.float32 for x in out[:3])


@pytest.mark.parametrize(('vocab', 'chunk_size'), [(101, None), (101, 8), (96, 16)])
def test_gradients_equal_autodiff_of_the_naive_form(vocab, chunk_size):
  inputs = _inputs(vocab=vocab)
  got = _grads(*inputs, temperature=0.7, chunk_size=chunk_size)
  for x, y in zip(got, _grads(*inputs, temperature=0.7, score=_naive), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


def test_soft_cap_equals_the_naive_form():
  inputs = _inputs()
  options = {'temperature': 0.7, 'soft_cap': 2.0}
  out = _score(*inputs, chunk_size=8, **options)
  for x, y in zip(out[:3], _naive(*inputs, **options)[:3], strict=True):
    np.testing.assert_allclose(x, y, atol=2e-6, rtol=1e-6)
  got = _grads(*inputs, chunk_size=8, **options)
  for x, y in zip(got, _grads(*inputs, score=_naive, **options), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('chunk_size', [None, 8])
def test_the_likeliest_tokens(chunk_size):
  hidden, head, targets = _inputs()
  mask = jnp.arange(37) != 5
  out = _score(hidden, head, targets, mask=mask, temperature=0.7, top_k=3, chunk_size=chunk_size)
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / 0.7
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  order = np.argsort(-log_p, axis=1)[:, :3]
  kept = np.asarray(mask)
  np.testing.assert_array_equal(out.top.token[kept], order[kept])
  want = np.take_along_axis(log_p, order, 1)
  np.testing.assert_allclose(out.top.log_prob[kept], want[kept], atol=2e-6, rtol=1e-6)
  assert not np.asarray(out.top.log_prob)[5].any() and out.top.rank[5] == 0
  chosen = np.take_along_axis(log_p, np.asarray(targets)[:, None], 1)
  np.testing.assert_array_equal(out.top.rank[kept], 1 + (log_p > chosen).sum(1)[kept])
  plain = _score(hidden, head, targets, mask=mask, temperature=0.7, chunk_size=chunk_size)
  np.testing.assert_array_equal(plain.log_prob, out.log_prob)


_STRICT = pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True)


@pytest.mark.parametrize('soft_cap', [None, 2.0])
@pytest.mark.parametrize('interpret', [True, _STRICT], ids=['plain', 'strict'])
def test_tpu_kernel_equals_the_xla_form(interpret, soft_cap, monkeypatch):
  """Blocks that neither rows, vocabulary nor width fill evenly."""
  spec = fused_log_prob_tpu.TpuSpec(rows=128, entries=128, width=128, interpret=interpret)
  monkeypatch.setattr(fused_log_prob_module, '_tpu_spec', lambda implementation, mesh: spec)
  hidden, head, targets = _inputs(count=150, width=256, vocab=301)
  hidden = hidden / 8
  options = {'temperature': jnp.linspace(0.5, 2.0, 150), 'mask': jnp.arange(150) % 7 != 0}

  def both(hidden, head):
    out, pull = jax.vjp(
      lambda *x: fused_log_prob(*x, targets, soft_cap=soft_cap, **options)[:3], hidden, head
    )
    return (*out, *pull(tuple(jnp.full_like(x, 0.3) for x in out)))

  got = jax.jit(both)(hidden, head)
  monkeypatch.undo()
  for x, y in zip(got, jax.jit(both)(hidden, head), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


def test_tpu_kernel_joins_the_parts_of_the_vocabulary(monkeypatch):
  mesh = sharding.make_mesh({'data': 2, 'tensor': 2}, jax.devices()[:4])
  spec = fused_log_prob_tpu.TpuSpec(rows=128, entries=128, width=128, interpret=True)
  monkeypatch.setattr(fused_log_prob_module, '_tpu_spec', lambda implementation, mesh: spec)
  hidden, head, targets = _inputs(count=32, width=128, vocab=300)
  score = jax.jit(lambda *x: fused_log_prob(*x, mesh=mesh)[:3])
  for x, y in zip(
    score(hidden / 8, head, targets), _naive(hidden / 8, head, targets)[:3], strict=True
  ):
    np.testing.assert_allclose(x, y, atol=5e-6, rtol=1e-5)


def test_temperature_per_row():
  hidden, head, targets = _inputs(count=4)
  temperature = jnp.asarray([0.5, 1.0, 1.5, 2.0], jnp.float32)
  out = _score(hidden, head, targets, temperature=temperature, chunk_size=20)
  want = _naive(hidden, head, targets, temperature[:, None])
  for x, y in zip(out[:3], want[:3], strict=True):
    np.testing.assert_allclose(x, y, atol=2e-6, rtol=1e-6)


def test_masked_rows_are_poison_proof():
  hidden, head, targets = _inputs()
  mask = jnp.arange(37) % 3 != 0
  kwargs = {'mask': mask, 'chunk_size': 8}
  dirty = jnp.where(mask[:, None], hidden, jnp.nan)
  wild = jnp.where(mask, targets, -7)
  clean = _score(hidden, head, targets, **kwargs)
  poisoned = _score(dirty, head, wild, **kwargs)
  for x, y in zip(clean[:3], poisoned[:3], strict=True):
    np.testing.assert_array_equal(x, y)
    assert not np.asarray(y)[~np.asarray(mask)].any()
  want = _naive(hidden, head, targets)
  np.testing.assert_allclose(poisoned.log_prob[mask], want.log_prob[mask], atol=2e-6, rtol=1e-6)
  d_hidden, d_head = _grads(dirty, head, wild, **kwargs)
  for x, y in zip((d_hidden, d_head), _grads(hidden, head, targets, **kwargs), strict=True):
    np.testing.assert_array_equal(x, y)
  assert not np.asarray(d_hidden)[~np.asarray(mask)].any()


def test_bfloat16_products_accumulate_in_float32():
  hidden, head, targets = _inputs(dtype=jnp.bfloat16)
  out = _score(hidden, head.astype(jnp.float32), targets, chunk_size=8)
  want = _naive(hidden.astype(jnp.float32), head.astype(jnp.float32), targets)
  # Products of two bfloat16 numbers are exact in float32, so only the order of sums differs.
  np.testing.assert_allclose(out.log_prob, want.log_prob, atol=1e-5, rtol=1e-5)
  d_hidden, d_head = _grads(hidden, head.astype(jnp.float32), targets, chunk_size=8)
  exact = _grads(hidden.astype(jnp.float32), head.astype(jnp.float32), targets, score=_naive)
  assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(d_hidden.astype(jnp.float32), exact[0], atol=5e-2, rtol=2e-2)
  np.testing.assert_allclose(d_head, exact[1], atol=5e-2, rtol=2e-2)


def test_no_logits_of_all_rows():
  inputs = _inputs(count=64, vocab=1031)
  text = _grads.lower(*inputs, chunk_size=100).compile().as_text()
  assert '64,1031]' not in text
  assert '1031,64]' not in text
  assert '[64,100]' in text  # 11 chunks, the last of which reaches back
  naive = _grads.lower(*inputs, score=_naive).compile().as_text()
  assert '64,1031]' in naive


def test_sharded_rows_and_vocabulary_equal_single():
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'tensor': 2}, jax.devices()[:8])
  hidden, head, targets = _inputs(count=32, vocab=64)
  rows = NamedSharding(mesh, P(('data', 'fsdp')))
  placed = (
    jax.device_put(hidden, rows),
    jax.device_put(head, NamedSharding(mesh, P('tensor', 'fsdp'))),
    jax.device_put(targets, rows),
  )
  for x, y in zip(
    _grads(*placed, chunk_size=8), _grads(hidden, head, targets, chunk_size=8), strict=True
  ):
    np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


def test_bad_arguments_are_refused():
  hidden, head, targets = _inputs()
  refused = [
    ('Flatten', (hidden[None], head, targets), {}),
    ('Flatten', (hidden, head[:, :3], targets), {}),
    ('no rows', (hidden[:0], head, targets[:0]), {}),
    ('targets must be int32', (hidden, head, targets.astype(jnp.float32)), {}),
    ('mask must be bool', (hidden, head, targets), {'mask': targets}),
    ('temperature must be > 0', (hidden, head, targets), {'temperature': 0.0}),
    ('chunk_size', (hidden, head, targets), {'chunk_size': 0}),
    ('soft_cap must be above 0', (hidden, head, targets), {'soft_cap': 0.0}),
    ('top_k must be from 0 to the vocabulary of 101', (hidden, head, targets), {'top_k': 102}),
    ('it is for TPU, and this is cpu', (hidden, head, targets), {'implementation': 'pallas'}),
    ('Choose from auto, pallas, xla', (hidden, head, targets), {'implementation': 'reference'}),
  ]
  for words, args, kwargs in refused:
    with pytest.raises(ValueError, match=words):
      fused_log_prob(*args, **kwargs)


@pytest.mark.parametrize(('vocab', 'width'), [(67, 16), (68, 15), (67, 15)])
def test_heads_that_do_not_divide_over_a_mesh_are_whole_on_every_device(vocab, width):
  mesh = sharding.make_mesh({'fsdp': 2, 'tensor': 2, 'data': 2}, jax.devices()[:8])
  hidden, head, targets = _inputs(count=16, width=width, vocab=vocab)

  def both(hidden, head, mesh=None):
    out, pull = jax.vjp(lambda *x: fused_log_prob(*x, targets, mesh=mesh, top_k=2), hidden, head)
    ones = jax.tree.map(lambda x: jnp.full_like(x, 0.3), out[:3])
    zeros = jax.tree.map(
      lambda x: np.zeros(x.shape, jax.dtypes.float0 if x.dtype == jnp.int32 else x.dtype), out.top
    )
    return out, pull(out._replace(**dict(zip(out._fields, ones, strict=False)), top=zeros))

  got = jax.jit(functools.partial(both, mesh=mesh))(hidden, head)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(both)(hidden, head)), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)
