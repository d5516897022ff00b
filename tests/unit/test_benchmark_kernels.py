"""The kernels' benchmark: its peers compute what they are compared with, and its counts are those of the tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernel_peers, kernels

_MODEL = kernels.Model(4, 2, 8, jnp.float32)
_CASE = kernels.Case(2, 16, 8)
_SETTING = kernels.Setting(_MODEL, (_CASE,), (_CASE,), dense=True)


def _attend(q, k, v):
  """One query [H, Dh] over keys and values [K, T, Dh] in float64."""
  grouped = np.asarray(q, np.float64).reshape(k.shape[0], -1, q.shape[-1])
  scores = np.einsum('krd,ktd->krt', grouped, np.asarray(k, np.float64)) / np.sqrt(q.shape[-1])
  weights = np.exp(scores)
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum('krt,ktd->krd', weights, np.asarray(v, np.float64)).reshape(q.shape)


def test_a_peer_runs_or_says_why_not():
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.standard_normal((1, 5, n, 8)), jnp.float32) for n in (4, 2, 2))
  attend = kernel_peers.peer('xla', 'cpu')
  out, (d_q, d_k, d_v) = kernel_peers.forward_and_backward(attend, q, k, v)
  for i in range(5):
    keys, values = (np.swapaxes(x[0, : i + 1], 0, 1) for x in (k, v))
    np.testing.assert_allclose(out[0, i], _attend(q[0, i], keys, values), atol=1e-6)
  assert (d_q.shape, d_k.shape, d_v.shape) == (q.shape, k.shape, v.shape)
  assert kernel_peers.peer('cudnn', 'cpu') == 'it is for gpu, and this is cpu'
  assert kernel_peers.peer('tokamax', 'cpu') == 'it is for gpu and tpu, and this is cpu'
  assert kernel_peers.peer('tokamax', 'tpu') == 'tokamax is not installed here'


def test_copied_decode_is_attention_of_each_row():
  rng = np.random.default_rng(1)
  q = jnp.asarray(rng.standard_normal((3, 4, 8)), jnp.float32)
  k, v = (jnp.asarray(rng.standard_normal((2, 3, 2, 7, 8)), jnp.float32) for _ in range(2))
  out = kernel_peers.copied_decode(q, k, v, jnp.int32(1))
  for row in range(3):
    np.testing.assert_allclose(out[row], _attend(q[row], k[1, row], v[1, row]), atol=1e-6)


def test_calls_take_turns():
  calls = []
  both = {'a': lambda: calls.append('a'), 'b': lambda: calls.append('b')}
  found = kernels.call_times(both, 2)
  assert calls == ['a', 'b', 'a', 'b', 'a', 'b']  # each compiles first, then they take turns
  assert {name: len(times) for name, times in found.items()} == {'a': 2, 'b': 2}
  assert set(kernels.shortest_s(both, 1)) == {'a', 'b'}


def test_counted_pairs_are_those_of_the_rule():
  case = kernels.Case(3, 64, 32)
  _, ends = kernels.layout(case, case.packed)
  index = np.arange(case.packed)
  seen = (index[None] <= index[:, None]) & (index[:, None] < ends[None])
  # Each token sees itself as well: half a pair more than half of a square counts.
  assert kernels.packed_pairs(case) == seen.sum() - case.packed / 2
  assert kernels.separate_pairs(case) == case.separate * (case.prompt + case.suffix) / 2
  assert kernels.needed_blocks(ends, 32) == kernels.count_case(case, 32)['needed'] == 12
  # Two products of 2 FLOPs forward, five backward.
  assert kernels.tflops(100.0, _MODEL, 2.0) == pytest.approx(7 * 2 * 8 * 4 * 100 / 2 / 1e12)


def test_what_is_measured_is_told_with_its_ratios():
  training = kernels.time_training(_CASE, _SETTING, 1)
  assert training['gain'] == training['separate_s'] / training['packed_s']
  speed = kernels.tflops(kernels.packed_pairs(_CASE), _MODEL, training['packed_s'])
  assert training['packed_tflops'] == speed
  decode = kernels.time_decode(_CASE, _SETTING, 1)
  # One turn: its ratio is the median.
  quicker = min(decode['row_by_row_s'], decode['copied_s'])
  assert decode['gain'] == quicker / decode['shared_s']
  assert decode['promised_gain'] == 48 / 32
  # 8 layers, 4 groups, keys and values of 2 heads of 8 floats.
  moved = 8 * 4 * 2 * 2 * 8 * 4 * _CASE.packed
  assert decode['shared_gb_s'] == pytest.approx(moved / decode['shared_s'] / 1e9)
  peers = kernels.time_peers(_CASE, _SETTING, 1)
  assert peers['xla'] > 0
  assert peers['cudnn'] == 'it is for gpu, and this is cpu'


def test_gain_of_a_decode_step_is_the_median_over_its_turns():
  times = {
    'shared_s': [1.0, 2.0, 9.0],
    'row_by_row_s': [2.0, 6.0, 9.0],
    'copied_s': [3.0, 3.0, 18.0],
  }
  found = kernels.decode_figures(_CASE, times, 10)
  assert (found['rows_per_read'], found['gain_as_chosen']) == (_CASE.samples, 2.0)
  assert found['gain'] == 2.0  # of 2, 3, 1 and of 3, 1.5, 2
  assert (found['shared_s'], found['row_by_row_s'], found['copied_s']) == (1.0, 2.0, 3.0)
  assert found['unshared_gb_s'] == 10 * _CASE.separate / 2.0 / 1e9
