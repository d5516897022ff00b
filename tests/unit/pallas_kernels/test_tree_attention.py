import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlax_stack import sharding
from rlax_stack.errors import ConfigError
from rlax_stack.pallas_kernels import tree_attention_xla, tree_rows
from rlax_stack.pallas_kernels.tree_attention import (
  AttentionShape,
  prepare_tree_attention,
  tree_attention,
)


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
  inputs = _inputs(layouts)

  def run(block, wide):
    spec = tree_attention_xla.XlaSpec(0.25, window=window, block=block, wide=wide)
    parts = tree_attention_xla.make_tables, tree_attention_xla.attend
    kernel = tree_rows.Kernel(spec, block, block, *parts)

    def attend(q, k, v, positions, ends):
      layout = tree_rows.lay_out(kernel, positions, ends)
      return tree_rows.attend_rows(kernel, layout, q, k, v, None)

    out, pull = jax.vjp(lambda *x: attend(*x, *inputs[3:5]), *inputs[:3])
    return out, *pull(inputs[5])

  got = jax.jit(lambda: run(8, wide))()
  _assert_close(got, jax.jit(lambda: run(8, 10**6))())
  _assert_close(got, _value_and_grads(*inputs, implementation='reference', window=window))


@pytest.mark.parametrize(('soft_cap', 'with_sinks'), [(3.0, False), (None, True), (2.0, True)])
def test_soft_cap_and_sinks_equal_reference(soft_cap, with_sinks):
  *inputs, cotangent = _inputs([_layout(THREE_LEVELS, 150), _layout([(30, [(20, [])])], 150)])
  sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0]) if with_sinks else None

  def run(implementation):
    def attend(q, k, v, sinks):
      options = {'soft_cap': soft_cap, 'sinks': sinks, 'implementation': implementation}
      return tree_attention(q, k, v, *inputs[3:], **options)

    out, pull = jax.vjp(attend, *inputs[:3], sinks)
    return jax.tree.leaves((out, pull(cotangent)))

  got = jax.jit(lambda: run('xla'))()
  _assert_close(got, jax.jit(lambda: run('reference'))())
  assert len(got) == 4 + with_sinks


def test_sinks_and_soft_cap_follow_the_rule_in_float64():
  q, k, v, positions, ends, _ = _inputs([_layout(THREE_LEVELS, 150)])
  sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0])
  out = jax.jit(lambda: tree_attention(q, k, v, positions, ends, sinks=sinks, soft_cap=2.0))()
  for i in (0, 45, 149):
    seen = [j for j in range(i + 1) if i < ends[0, j]]
    for head in range(4):
      keys = np.asarray(k[0, seen, head // 2], np.float64)
      scores = 2.0 * np.tanh(keys @ np.asarray(q[0, i, head], np.float64) / 4 / 2.0)
      weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(float(sinks[head])))
      want = weights @ np.asarray(v[0, seen, head // 2], np.float64)
      np.testing.assert_allclose(out[0, i, head], want, atol=1e-6)


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


@pytest.mark.parametrize(
  ('shape', 'window'), [({'context': 2, 'fsdp': 2, 'tensor': 2}, None), ({'context': 4}, 70)]
)
def test_rows_split_over_context_equal_whole_ones(shape, window):
  mesh = sharding.make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])
  inputs = _inputs([_layout(THREE_LEVELS, 256), _layout(SEQUENCES, 256)])
  split = _value_and_grads(*inputs, mesh=mesh, window=window)
  _assert_close(split, _value_and_grads(*inputs, window=window), 1e-6)
  assert split[0].sharding.spec[1] == 'context'


def test_one_preparation_serves_every_layer():
  q, k, v, positions, ends, _ = _inputs([_layout(THREE_LEVELS, 150), _layout(SEQUENCES, 150)])
  attend = prepare_tree_attention(positions, ends, shape=AttentionShape(4, 2, 16, q.dtype))
  np.testing.assert_array_equal(attend(q, k, v), tree_attention(q, k, v, positions, ends))
  np.testing.assert_array_equal(attend(2 * q, k, v), tree_attention(2 * q, k, v, positions, ends))

  def layers(x):
    shape = AttentionShape(4, 2, 16, x.dtype)
    attend = prepare_tree_attention(positions, ends, shape=shape)
    return jax.lax.fori_loop(0, 3, lambda i, x: attend(x, k, v), x)

  # The sorts that make the lists stand before the loop over layers.
  *before, loop = map(str, jax.make_jaxpr(layers)(q).eqns)
  assert any('sort[' in line for line in before)
  assert 'scan[' in loop
  assert 'sort[' not in loop


@pytest.mark.parametrize(
  ('implementation', 'sizes'),
  [('xla', None), ('reference', None), ('xla', {'fsdp': 2}), ('xla', {'context': 2, 'tensor': 2})],
)
def test_layers_of_both_kinds_take_their_own_tables(implementation, sizes):
  mesh = sizes and sharding.make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
  q, k, v, positions, ends, _ = _inputs([_layout(THREE_LEVELS, 256), _layout(SEQUENCES, 256)])
  options = {'implementation': implementation, 'mesh': mesh}

  @jax.jit
  def layers(q):
    shape = AttentionShape(4, 2, 16, q.dtype)
    attend = prepare_tree_attention(
      positions, ends, shape=shape, window=11, mixed=True, scale=0.3, soft_cap=2.0, **options
    )
    kinds = jnp.asarray([True, False])
    return jax.lax.map(lambda sees_all: attend(q, k, v, sees_all=sees_all), kinds)

  for got, window in zip(layers(q), (None, 11), strict=True):
    rules = {'window': window, 'scale': 0.3, 'soft_cap': 2.0}
    want = tree_attention(q, k, v, positions, ends, implementation='reference', **rules)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_mesh_errors_say_what_to_change():
  inputs = _inputs([_layout(THREE_LEVELS, 150)])[:5]
  context = sharding.make_mesh({'context': 2}, jax.devices()[:2])
  with pytest.raises(ConfigError, match='row_length to a multiple of 128'):
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
    (
      'it is for TPU and Hopper GPUs, and this is cpu',
      (q, k, v, positions, ends),
      {'implementation': 'pallas'},
    ),
    ('unknown', (q, k, v, positions, ends), {'implementation': 'flash'}),
    ('divide those of q', (q[:, :, :3], k, v, positions, ends), {}),
    ('soft_cap must be above 0', (q, k, v, positions, ends), {'soft_cap': 0.0}),
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
  out = jax.jit(
    lambda *x: tree_rows.tree_attention_reference(*x, positions, ends, window=None, scale=0.25)
  )(q, k, v)
  assert not np.asarray(out[:, 40:]).any()
  assert np.asarray(out[:, :40]).any()
