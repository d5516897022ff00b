import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlax_stack import sharding
from rlax_stack.errors import ConfigError
from rlax_stack.pallas_kernels.tree_attention import tree_attention, tree_attention_reference
from rlax_stack.pallas_kernels.tree_attention_xla import tree_attention_xla


def _layout(trees, tokens):
  """Positions and subtree ends of a row. A tree is (length, [children])."""
  positions, ends = [], []

  def walk(node, depth):
    length, children = node
    start = len(positions)
    positions.extend(range(depth, depth + length))
    ends.extend([0] * length)
    for child in children:
      walk(child, depth + length)
    ends[start : start + length] = [len(positions)] * length

  for tree in trees:
    walk(tree, 0)
  pad = tokens - len(positions)
  ends += [len(ends) + i + 1 for i in range(pad)]
  return np.array(positions + [0] * pad, np.int32), np.array(ends, np.int32)


THREE_LEVELS = [(13, [(21, [(9, []), (30, [])]), (17, []), (40, [(3, []), (5, [])])])]
SEQUENCES = [(40, []), (1, []), (70, []), (29, [])]


def _inputs(layouts, heads=4, kv_heads=2, width=16, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  positions, ends = (jnp.asarray(np.stack(x)) for x in zip(*layouts, strict=True))
  rows, tokens = positions.shape
  draw = lambda count: jnp.asarray(rng.normal(size=(rows, tokens, count, width)), dtype)  # noqa: E731
  return draw(heads), draw(kv_heads), draw(kv_heads), positions, ends, draw(heads)


@functools.partial(jax.jit, static_argnames=('implementation', 'window', 'mesh'))
def _value_and_grads(q, k, v, positions, ends, cotangent, **kwargs):
  def run(q, k, v):
    return tree_attention(q, k, v, positions, ends, **kwargs)

  out, pull = jax.vjp(run, q, k, v)
  return out, *pull(cotangent)


_attend = jax.jit(tree_attention, static_argnames=('implementation',))


def _assert_close(left, right, tolerance=1e-5):
  for x, y in zip(left, right, strict=True):
    np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(('heads', 'kv_heads'), [(4, 4), (9, 3), (4, 1)])
def test_xla_equals_reference(heads, kv_heads):
  inputs = _inputs([_layout(THREE_LEVELS, 150), _layout(SEQUENCES, 150)], heads, kv_heads)
  got = _value_and_grads(*inputs, implementation='xla')
  _assert_close(got, _value_and_grads(*inputs, implementation='reference'))


@pytest.mark.parametrize('window', [None, 50])
@pytest.mark.parametrize('wide', [2, 3])
def test_wide_key_blocks_equal_reference(wide, window):
  layouts = [_layout([(90, [(30, []), (50, [])])], 170), _layout([(100, []), (70, [])], 170)]
  q, k, v, positions, ends, cotangent = _inputs(layouts)
  static = {'window': window, 'scale': 0.25}

  def both(kernel, **options):
    out, pull = jax.vjp(lambda *x: kernel(*x, positions, ends, **static, **options), q, k, v)
    return out, *pull(cotangent)

  narrow = jax.jit(lambda: both(tree_attention_xla, block=8, wide=10**6))()
  got = jax.jit(lambda: both(tree_attention_xla, block=8, wide=wide))()
  _assert_close(got, narrow)
  _assert_close(got, jax.jit(lambda: both(tree_attention_reference))())


@pytest.mark.parametrize('window', [1, 20])
def test_window_equals_reference(window):
  inputs = _inputs([_layout(THREE_LEVELS, 192), _layout([(180, [])], 192)])
  got = _value_and_grads(*inputs, implementation='xla', window=window)
  _assert_close(got, _value_and_grads(*inputs, implementation='reference', window=window))


def test_reference_follows_the_rule_in_float64():
  q, k, v, positions, ends, _ = _inputs([_layout(THREE_LEVELS, 150)])
  out = np.asarray(_attend(q, k, v, positions, ends, implementation='reference'))
  for i in (0, 20, 45, 100, 149):
    seen = [j for j in range(i + 1) if i < ends[0, j]]
    for head in range(4):
      keys = np.asarray(k[0, seen, head // 2], np.float64)
      scores = keys @ np.asarray(q[0, i, head], np.float64) / 4
      weights = np.exp(scores - scores.max())
      want = weights / weights.sum() @ np.asarray(v[0, seen, head // 2], np.float64)
      np.testing.assert_allclose(out[0, i, head], want, atol=1e-6)


def test_packed_tree_equals_separate_copies():
  prompt, lengths = 50, (30, 7, 44)
  used = prompt + sum(lengths)
  row = _layout([(prompt, [(n, []) for n in lengths])], 150)
  q, k, v, positions, ends, cotangent = _inputs([row])
  got = _value_and_grads(q, k, v, positions, ends, cotangent)
  want = [np.zeros(x.shape, np.float32) for x in got]
  start = prompt
  for copy, length in enumerate(lengths):
    take = np.r_[0:prompt, start : start + length]
    start += length
    alone = (jnp.asarray(x)[None] for x in _layout([(len(take), [])], 150))
    here = [np.zeros(x.shape, np.float32) for x in (q, k, v, cotangent)]
    for whole, part in zip((q, k, v, cotangent), here, strict=True):
      part[:, : len(take)] = whole[:, take]
    if (
      copy > 0
    ):  # the prompt's own outputs exist once in the tree: one copy carries their cotangent
      here[3][:, :prompt] = 0
    parts = [np.asarray(x)[:, : len(take)] for x in _value_and_grads(*here[:3], *alone, here[3])]
    want[0][:, take] = parts[0]
    for total, part in zip(want[1:], parts[1:], strict=True):
      total[:, take] += part
  _assert_close([x[:, :used] for x in got], [x[:, :used] for x in want])


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
def test_nan_in_padding_reaches_nothing(implementation):
  q, k, v, positions, ends, cotangent = _inputs([_layout([(30, [(20, []), (25, [])])], 150)])
  cotangent = cotangent.at[:, 75:].set(0)
  poisoned = [x.at[:, 75:].set(jnp.nan) for x in (q, k, v)]
  clean = _value_and_grads(q, k, v, positions, ends, cotangent, implementation=implementation)
  dirty = _value_and_grads(*poisoned, positions, ends, cotangent, implementation=implementation)
  np.testing.assert_array_equal(clean[0][:, :75], dirty[0][:, :75])
  for x, y in zip(clean[1:], dirty[1:], strict=True):
    np.testing.assert_array_equal(x, y)
    assert not np.asarray(y[:, 75:]).any()


def test_padding_sees_itself():
  q, k, v, positions, ends, _ = _inputs([_layout([(30, [])], 64)])
  out = _attend(q, k, v, positions, ends)
  np.testing.assert_array_equal(out[:, 30:, 2], v[:, 30:, 1])


def test_bfloat16_keeps_float32_state():
  inputs = _inputs([_layout(THREE_LEVELS, 150)], dtype=jnp.bfloat16)
  got = _value_and_grads(*inputs, implementation='xla')
  exact = _value_and_grads(*(x.astype(jnp.float32) if x.ndim == 4 else x for x in inputs))
  assert all(x.dtype == jnp.bfloat16 for x in got)
  _assert_close([x.astype(jnp.float32) for x in got], exact, 5e-2)


_TREES = st.recursive(
  st.tuples(st.integers(1, 25), st.just([])),
  lambda nodes: st.tuples(st.integers(1, 25), st.lists(nodes, max_size=3)),
  max_leaves=5,
)


@settings(max_examples=10, deadline=None)
@given(st.lists(_TREES, min_size=1, max_size=3))
def test_any_forest_equals_reference(trees):
  size = lambda node: node[0] + sum(map(size, node[1]))  # noqa: E731
  trees = [tree for i, tree in enumerate(trees) if sum(map(size, trees[: i + 1])) <= 190]
  inputs = _inputs([_layout(trees, 190)], heads=2, kv_heads=1)
  got = _value_and_grads(*inputs, implementation='xla')
  _assert_close(got, _value_and_grads(*inputs, implementation='reference'))


@pytest.mark.parametrize('shape', [{'data': 2, 'fsdp': 2, 'tensor': 2}, {'tensor': 2, 'expert': 4}])
def test_sharded_equals_single(shape):
  mesh = sharding.make_mesh(shape, jax.devices()[:8])
  inputs = _inputs([_layout(THREE_LEVELS, 150)] * 2 + [_layout(SEQUENCES, 150)] * 2)
  split = _value_and_grads(*inputs, mesh=mesh)
  _assert_close(split, _value_and_grads(*inputs), 1e-6)
  assert split[0].sharding.spec[2] == 'tensor'


def test_mesh_errors_say_what_to_change():
  inputs = _inputs([_layout(THREE_LEVELS, 150)])[:5]
  context = sharding.make_mesh({'context': 2}, jax.devices()[:2])
  with pytest.raises(ConfigError, match='config.mesh.context = 1'):
    tree_attention(*inputs, mesh=context)
  tensor = sharding.make_mesh({'tensor': 4}, jax.devices()[:4])
  with pytest.raises(ConfigError, match='dimension 2 of the keys has size 2'):
    tree_attention(*inputs, mesh=tensor)
  rows = sharding.make_mesh({'data': 2}, jax.devices()[:2])
  with pytest.raises(ConfigError, match='dimension 0 .* size 1'):
    tree_attention(*inputs, mesh=rows)


def test_bad_arguments_are_refused():
  q, k, v, positions, ends, _ = _inputs([_layout(THREE_LEVELS, 150)])
  refused = [
    ('pallas', (q, k, v, positions, ends), {'implementation': 'pallas'}),
    ('unknown', (q, k, v, positions, ends), {'implementation': 'flash'}),
    ('divide those of q', (q[:, :, :3], k, v, positions, ends), {}),
    ('must be', (q[0], k, v, positions, ends), {}),
    ('positions and subtree_end must be', (q, k, v, positions[:, :5], ends), {}),
    ('int32', (q, k, v, positions, ends.astype(jnp.float32)), {}),
    ('share a dtype', (q.astype(jnp.bfloat16), k, v, positions, ends), {}),
    ('window', (q, k, v, positions, ends), {'window': 0}),
  ]
  for words, args, kwargs in refused:
    with pytest.raises(ValueError, match=words):
      tree_attention(*args, **kwargs)


def test_xla_form_holds_no_square():
  inputs = _inputs([_layout(THREE_LEVELS, 512)], heads=2, kv_heads=1, width=8)
  text = _value_and_grads.lower(*inputs).compile().as_text()
  assert '512,512]' not in text
  dense = _value_and_grads.lower(*inputs, implementation='reference')
  assert '512,512]' in dense.compile().as_text()


def test_tokens_left_out_give_zero():
  q, k, v, positions, ends, _ = _inputs([_layout([(40, [])], 64)])
  ends = jnp.where(jnp.arange(64)[None] < 40, ends, 0)
  for kernel in (tree_attention_xla, tree_attention_reference):
    run = jax.jit(functools.partial(kernel, window=None, scale=0.25))
    out = run(q, k, v, positions, ends)
    assert not np.asarray(out[:, 40:]).any()
    assert np.asarray(out[:, :40]).any()
