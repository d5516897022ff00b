"""Quantised rollouts: log-probs are those of the quantised policy, in prefill and decode, and swaps quantise anew."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.models import decoder
from rlax_stack.models.quantised import KERNEL_KINDS, QuantisedKernel
from rlax_stack.rollout import quantise
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig, empty_state

_FIELDS = ('tokens', 'log_probs_t', 'raw_log_probs_t')


def _round(x, kind):
  """Nearest values of int8 or fp8 with one scale per line of the last axis, in numpy."""
  x = np.asarray(x, np.float32)
  largest = np.abs(x).max(-1, keepdims=True)
  if kind.startswith('int8'):
    scales = largest / np.float32(127)
    return np.clip(np.round(x / scales), -127, 127).astype(np.float32) * scales
  scales = largest / np.float32(448)
  return (x / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales


def _rounded_weights(params, kind):
  """The plain tree whose kernels, and nothing else, are what the quantised ones stand for.

  Rounded by the same program (held to its bounds in models/test_quantised.py): a division that ends one bit away may
  put a weight on the other side of a step.
  """
  layers = quantise.quantise_model(params, kind, jnp.float32)['layers']
  rounded = {
    name: {**part, 'kernel': layers[name]['kernel'].dequantised()} if 'kernel' in part else part
    for name, part in params['layers'].items()
  }
  return {**params, 'layers': rounded}


def _engine(tiny, **changes):
  """Prompts come in pieces of one page, rows in pages of eight."""
  return Engine(tiny.MODEL, dataclasses.replace(tiny.SIZES, prefill_chunk=16, **changes))


@pytest.fixture(scope='module')
def engines(tiny):
  """Engines by (weights, kv)."""
  pairs = [('int8', 'same'), ('fp8', 'same'), ('int8_dynamic', 'same'), ('same', 'int8')]
  pairs += [('same', 'fp8'), ('int8', 'int8')]
  return {pair: _engine(tiny, weights=pair[0], kv=pair[1]) for pair in pairs}


def _requests(tiny, **sampling):
  prompts = [tiny.prompt(g, 4 + 13 * g) for g in range(3)]  # of one and two pieces
  return [tiny.request(g, i, tokens=p, **sampling) for g, p in enumerate(prompts) for i in (0, 1)]


@pytest.mark.parametrize('kind', ['int8', 'fp8'])
def test_log_probs_equal_the_plain_decoder_on_the_rounded_weights(tiny, engines, kind):
  scheduler = tiny.scheduler(of=lambda: engines[kind, 'same'])
  rounded = _rounded_weights(tiny.params(), kind)
  far = 0.0
  for sample in scheduler.generate_all(_requests(tiny)):
    assert np.abs(sample.raw_log_probs_t - tiny.sampled_log_probs(sample, rounded)).max() < 1e-4
    np.testing.assert_allclose(sample.log_probs_t, sample.raw_log_probs_t, atol=1e-6)
    far = max(far, np.abs(sample.raw_log_probs_t - tiny.sampled_log_probs(sample)).max())
  assert far > 5e-3  # from the learner's policy, which is another one


@pytest.mark.parametrize('kind', ['int8', 'fp8'])
def test_a_swap_quantises_anew_and_equals_a_cold_engine(tiny, engines, kind):
  scheduler = tiny.scheduler(of=lambda: engines[kind, 'same'])
  scheduler.generate_all(_requests(tiny))
  scheduler.swap_params(tiny.params(1), 1)
  cold = tiny.scheduler(of=lambda: engines[kind, 'same'])
  cold.swap_params(tiny.params(1), 1)
  rounded = _rounded_weights(tiny.params(1), kind)
  both = zip(*(s.generate_all(_requests(tiny)) for s in (scheduler, cold)), strict=True)
  for warm, want in both:
    for name in _FIELDS:
      np.testing.assert_array_equal(getattr(warm, name), getattr(want, name))
    assert np.abs(warm.raw_log_probs_t - tiny.sampled_log_probs(warm, rounded)).max() < 1e-4


def test_with_rounded_activations_prefill_and_decode_are_one_policy(tiny, engines):
  """Sums of integers are exact, but an activation may fall to the other side of a step: a wider tolerance."""
  samples = tiny.scheduler(of=lambda: engines['int8_dynamic', 'same']).generate_all(_requests(tiny))
  params = quantise.quantise_model(tiny.params(), 'int8_dynamic', jnp.float32)
  near = [np.abs(s.raw_log_probs_t - tiny.sampled_log_probs(s, params)).max() for s in samples]
  far = [np.abs(s.raw_log_probs_t - tiny.sampled_log_probs(s)).max() for s in samples]
  assert max(near) < 0.1 * max(far)


def _attention(q, k, v, weights):
  """Causal attention of q [T, H, Dh]; by `weights` bool [T, T] a query sees keys as they are, else rounded."""
  (exact_k, rounded_k), (exact_v, rounded_v) = k, v
  length, heads, dim = q.shape
  repeat = heads // exact_k.shape[1]
  of_heads = [jnp.repeat(x, repeat, axis=1) for x in (exact_k, rounded_k, exact_v, rounded_v)]
  scores = [jnp.einsum('thd,shd->hts', q, x) * dim**-0.5 for x in of_heads[:2]]
  exact = jnp.asarray(weights)[None]
  seen = jnp.asarray(np.tril(np.ones((length, length), bool)))[None]
  probs = jax.nn.softmax(jnp.where(seen, jnp.where(exact, *scores), -1e30), -1)
  parts = [jnp.where(keep, probs, 0.0) for keep in (exact, ~exact)]
  return sum(jnp.einsum('hts,shd->thd', p, x) for p, x in zip(parts, of_heads[2:], strict=True))


def _kv_log_probs(tiny, sample, round_kv, params=None):
  """Log-probs of a sample by the plain decoder: pieces of 16 prompt tokens see themselves as they are."""
  prompt = len(sample.request.prompt_tokens)
  tokens = np.concatenate([sample.request.prompt_tokens, sample.tokens])
  places = np.arange(len(tokens))
  piece = np.where(places < prompt, places // 16, -1)
  own_piece = (piece[:, None] == piece[None, :]) & (piece >= 0)[:, None]

  def attend(q, k, v):
    rounded = [jnp.asarray(round_kv(np.asarray(x[0]))) for x in (k, v)]
    return _attention(q[0], (k[0], rounded[0]), (v[0], rounded[1]), own_piece)[None]

  params = tiny.params() if params is None else params
  with jax.disable_jit():
    hidden = decoder.hidden_states(
      params, tiny.MODEL, jnp.asarray(tokens)[None], jnp.asarray(places, jnp.int32)[None], attend
    )
  logits = tiny.log_softmax(np.asarray(hidden[0] @ decoder.lm_head(params, tiny.MODEL).T, float))
  return logits[prompt - 1 : -1][np.arange(len(sample.tokens)), sample.tokens]


@pytest.mark.parametrize('kind', ['int8', 'fp8'])
def test_log_probs_with_quantised_kv_equal_the_plain_decoder_on_rounded_kv(tiny, engines, kind):
  """1e-3: one number on the other side of a rounding step. A neighbour's scale is far outside."""
  scheduler = tiny.scheduler(of=lambda: engines['same', kind])

  def wrong(x):
    scales = np.abs(x).max(-1, keepdims=True)
    return _round(x, kind) * np.roll(scales, 1, axis=0) / scales

  right, off = [], []
  for sample in scheduler.generate_all(_requests(tiny))[::2]:
    got = sample.raw_log_probs_t
    right.append(np.abs(got - _kv_log_probs(tiny, sample, lambda x: _round(x, kind))).max())
    off.append(np.abs(got - _kv_log_probs(tiny, sample, wrong)).max())
  assert max(right) < 1e-3
  assert min(off) > 5e-2


def test_set_back_moved_and_swapped_samples_keep_their_bits(tiny, engines):
  both = engines['int8', 'int8']
  requests = _requests(tiny, max_tokens=20)
  wanted = tiny.scheduler(of=lambda: both).generate_all(requests)
  short = _engine(tiny, weights='int8', kv='int8', suffix_pages=8)
  scheduler = tiny.scheduler(of=lambda: short)
  source, target = tiny.scheduler(of=lambda: both), tiny.scheduler(of=lambda: both)
  for request in requests:
    source.submit(request)
  done = source.step()
  for request in requests[::2]:
    target.import_row(source.export_row(*request.identity))
  while source.has_work or target.has_work:
    done += source.step() + target.step()
  moved = {sample.request.identity: sample for sample in done}
  for got, want in zip(scheduler.generate_all(requests), wanted, strict=True):
    for name in _FIELDS:
      np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
      other = moved[want.request.identity]
      np.testing.assert_array_equal(getattr(other, name), getattr(want, name))
  assert scheduler.stats.replayed_tokens > 0 and target.stats.replayed_tokens > 0
  scheduler.swap_params(tiny.params(1), 1)
  cold = tiny.scheduler(of=lambda: both)
  cold.swap_params(tiny.params(1), 1)
  warm = zip(scheduler.generate_all(requests), cold.generate_all(requests), strict=True)
  for got, want in warm:
    np.testing.assert_array_equal(got.raw_log_probs_t, want.raw_log_probs_t)


@pytest.mark.parametrize('kind', sorted(KERNEL_KINDS))
def test_a_quantised_copy_is_what_a_quantised_engine_loads(tiny, engines, kind):
  """Also: one byte a weight in both forms, and nothing but kernels of layers is quantised."""
  copy = quantise.quantise_params(tiny.engine().load_params(tiny.params()), kind)
  loaded = engines[kind, 'same'].load_params(tiny.params())
  assert jax.tree.structure(copy) == jax.tree.structure(loaded)
  jax.tree.map(np.testing.assert_array_equal, copy, loaded)
  layers = copy.model['layers']
  assert all(isinstance(layers[f'{n}_proj']['kernel'], QuantisedKernel) for n in 'qkvo')
  fused = copy.kernels[1]['qkv']
  parts = [layers[f'{n}_proj']['kernel'] for n in 'qkv']
  np.testing.assert_array_equal(fused.values, jnp.concatenate([p.values[1] for p in parts]))
  np.testing.assert_array_equal(fused.scales, jnp.concatenate([p.scales[1] for p in parts]))
  np.testing.assert_array_equal(
    decoder.lm_head(copy.model, tiny.MODEL), tiny.params()['embedder']['embedding']
  )


def test_tables_hold_a_scale_per_token_and_head(tiny):
  kv = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
  kv *= np.geomspace(0.01, 100, 6, dtype=np.float32).reshape(3, 2, 1)
  at = (0, jnp.asarray([1, 2, 9]), slice(None), jnp.asarray([3, 0, 0]))  # page 9 is outside
  for kind in quantise.KV_KINDS:
    table = quantise.empty_table((2, 4, 2, 8, 8), kind, jnp.float32)
    table = quantise.write_table(table, at, jnp.asarray(kv), unique_indices=True)
    got = quantise.read_table(table, at, jnp.float32)
    np.testing.assert_allclose(got[:2], _round(kv, kind)[:2], rtol=1e-6)
    assert int(jnp.count_nonzero(table.scales)) == 4
    assert quantise.table_values(table).dtype.itemsize == 1
  plain = quantise.empty_table((2, 4, 2, 8, 8), 'same', jnp.bfloat16)
  plain = quantise.write_table(plain, at, jnp.asarray(kv, jnp.bfloat16), unique_indices=True)
  np.testing.assert_array_equal(
    quantise.read_table(plain, at, jnp.bfloat16)[:2], kv[:2].astype(ml_dtypes.bfloat16)
  )
  assert quantise.decode_scales(plain, plain, plain, plain) is None
  scales = quantise.decode_scales(*[table] * 4)
  assert scales is not None and scales.suffix_v is table.scales


def test_tables_shrink_and_stay_as_they_were_where_nothing_is_asked_for(tiny):
  sizes = dataclasses.replace(tiny.SIZES, compute_dtype=jnp.bfloat16)
  plain, small = (
    empty_state(tiny.MODEL, dataclasses.replace(sizes, kv=k)) for k in ('same', 'int8')
  )
  assert plain.suffix_k.dtype == jnp.bfloat16
  assert small.suffix_k.values.dtype == small.prefix_v.values.dtype == jnp.int8
  assert small.suffix_k.scales.shape == plain.suffix_k.shape[:-1]


@pytest.mark.parametrize('name', ['weights', 'kv'])
def test_unknown_kinds_are_refused(name):
  with pytest.raises(ConfigError, match=f"EngineConfig.{name} must be one of same, .*'int4'"):
    EngineConfig(**{name: 'int4'})
