"""Tree attention over any group, against plain softmax attention with a mask made from the paths of the tree.

The mask here is the set of ancestors of every token, found by walking the tree, and never its `subtree_end`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from rlax_stack.pallas_kernels import tree_attention_tpu, tree_attention_xla, tree_rows

_TOKENS, _WIDTH = 512, 8

# Memory starts as NaN, reads outside of it raise, and races between kernels' copies are found.
_STRICT = pltpu.InterpretParams(
  uninitialized_memory='nan', out_of_bounds_reads='raise', detect_races=True
)


class _Group(NamedTuple):
  """A prompt, its samples, and what the first of them branches into."""

  prompt: int
  samples: tuple[int, ...]
  third_level: tuple[int, ...] = ()


class _Options(NamedTuple):
  window: int | None = None
  soft_cap: float | None = None
  with_sinks: bool = False


class _Row(NamedTuple):
  positions: np.ndarray  # int32 [T]
  ends: np.ndarray  # int32 [T]
  sees: np.ndarray  # bool [T, T]


def _row(group):
  """The group packed into a row, its tokens listed by walking the tree."""
  paths, ends = [], np.arange(1, _TOKENS + 1)

  def walk(length, children, above):
    start = len(paths)
    for _ in range(length):
      above = (*above, len(paths))
      paths.append(above)
    for child in children:
      walk(*child, above)
    ends[start : start + length] = len(paths)

  leaves = [(length, []) for length in group.third_level]
  samples = [(n, leaves if i == 0 else []) for i, n in enumerate(group.samples)]
  walk(group.prompt, samples, ())
  paths += [(i,) for i in range(len(paths), _TOKENS)]
  sees = np.zeros((_TOKENS, _TOKENS), bool)
  for token, path in enumerate(paths):
    sees[token, list(path)] = True
  positions = np.array([len(path) - 1 for path in paths], np.int32)
  return _Row(positions, ends.astype(np.int32), sees)


def _plain(q, k, v, sinks, positions, sees, options):
  """Softmax attention with the mask of paths; q [T, H, Dh], k and v [T, 1, Dh]."""
  if options.window is not None:
    sees = sees & (positions[:, None] - positions[None] < options.window)
  scores = jnp.einsum('ihd,jd->hij', q, k[:, 0]) * _WIDTH**-0.5
  if options.soft_cap is not None:
    scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
  scores = jnp.where(sees[None], scores, -jnp.inf)
  if sinks is not None:
    sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    scores = jnp.concatenate([scores, sink], -1)
  weights = jax.nn.softmax(scores, -1)[..., :_TOKENS]
  return jnp.einsum('hij,jd->ihd', weights, v[:, 0])


def _kernel(form, options):
  static = {'scale': _WIDTH**-0.5, 'window': options.window, 'soft_cap': options.soft_cap}
  if form == 'xla':
    spec, block = tree_attention_xla.XlaSpec(**static), tree_attention_xla.XlaSpec(1.0).block
    return tree_rows.Kernel(
      spec, block, block, tree_attention_xla.make_tables, tree_attention_xla.attend
    )
  spec = tree_attention_tpu.TpuSpec(
    **static,
    block_q=128,
    block_kv=128,
    vmem_limit=1 << 26,
    interpret=_STRICT if form == 'strict' else True,
  )
  return tree_rows.Kernel(spec, 128, 128, tree_attention_tpu.make_tables, tree_attention_tpu.attend)


@functools.partial(jax.jit, static_argnames=('form', 'options'))
def _value_and_grads(q, k, v, sinks, row, cotangent, *, form, options):
  """Output and gradients of q, k, v and sinks, all of one row."""

  def attend(q, k, v, sinks):
    if form == 'plain':
      return _plain(q, k, v, sinks, row.positions, row.sees, options)
    kernel = _kernel(form, options)
    layout = tree_rows.lay_out(kernel, row.positions[None], row.ends[None])
    return tree_rows.attend_rows(kernel, layout, q[None], k[None], v[None], sinks)[0]

  out, pull = jax.vjp(attend, q, k, v, sinks)
  return jax.tree.leaves((out, pull(cotangent)))


def _inputs(ratio, with_sinks, dtype=jnp.float32):
  rng = np.random.default_rng(ratio)
  q, k, v, cotangent = (
    jnp.asarray(rng.standard_normal((_TOKENS, heads, _WIDTH)), dtype)
    for heads in (ratio, 1, 1, ratio)
  )
  sinks = jnp.asarray(rng.standard_normal(ratio), jnp.float32) if with_sinks else None
  return q, k, v, sinks, cotangent


@st.composite
def _groups(draw):
  """Up to 16 samples; one that no longer fits in the row is of no token."""
  prompt = draw(st.sampled_from([0, 1, 127, 128, 129, 200]))
  third = tuple(draw(st.lists(st.sampled_from([1, 2, 30]), max_size=3)))
  wanted = draw(st.lists(st.sampled_from([0, 1, 2, 31, 127, 128, 129]), min_size=1, max_size=16))
  samples, room = [], _TOKENS - prompt - sum(third)
  for length in wanted:
    samples.append(length if length <= room else 0)
    room -= samples[-1]
  return _Group(prompt, tuple(samples), third)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 4, deadline=None, derandomize=True)
@given(
  group=_groups(),
  ratio=st.sampled_from([1, 4, 7, 8]),
  options=st.builds(
    _Options,
    window=st.sampled_from([None, 1, 50, 130]),
    soft_cap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
  ),
  form=st.sampled_from(['interpreted', 'strict', 'xla']),
)
@example(
  _Group(0, (127, 0, 129)), 4, _Options(), 'interpreted'
)  # no prompt: sequences of their own
@example(_Group(129, (128, 31), (30, 0, 127)), 4, _Options(130, 2.0, True), 'strict')
@example(_Group(128, (1,) * 15 + (0,)), 1, _Options(with_sinks=True), 'strict')
@example(_Group(127, (24,) * 16), 7, _Options(window=50), 'interpreted')
@example(_Group(1, (0,)), 8, _Options(soft_cap=2.0), 'strict')  # a row of one token
def test_any_group_equals_plain_attention_over_its_paths(group, ratio, options, form):
  row = _row(group)
  q, k, v, sinks, cotangent = _inputs(ratio, options.with_sinks)
  got = _value_and_grads(q, k, v, sinks, row, cotangent, form=form, options=options)
  want = _value_and_grads(q, k, v, sinks, row, cotangent, form='plain', options=options)
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


@jax.jit
def _causal(q, k, v, cotangent):
  """Output and gradients of one sequence in the dtype of q, softmax and sums in float32."""
  positions = jnp.arange(q.shape[0])
  sees = positions[None] <= positions[:, None]

  def attend(*arrays):
    # Products of bfloat16 are exact in float32, in which they are added up.
    q, k, v = (x.astype(jnp.float32) for x in arrays)
    scores = jnp.einsum('ihd,jd->hij', q, k[:, 0]) * _WIDTH**-0.5
    weights = jax.nn.softmax(jnp.where(sees[None], scores, -jnp.inf), -1)
    weights = weights.astype(arrays[0].dtype).astype(jnp.float32)
    return jnp.einsum('hij,jd->ihd', weights, v[:, 0]).astype(arrays[0].dtype)

  out, pull = jax.vjp(attend, q, k, v)
  return out, *pull(cotangent)


def _unshared(q, k, v, cotangent, group):
  """The same of a copy of the prompt per sample; the copies' gradients are added up in float32."""
  totals = [np.zeros(x.shape, np.float32) for x in (q, q, k, v)]
  start = group.prompt
  for copy, length in enumerate(group.samples):
    take = np.r_[0 : group.prompt, start : start + length]
    start += length
    # The outputs of the prompt are there once: the first copy has their cotangent.
    here = cotangent[take] if copy == 0 else cotangent[take].at[: group.prompt].set(0)
    parts = [np.asarray(x, np.float32) for x in _causal(q[take], k[take], v[take], here)]
    totals[0][take] = parts[0]
    for total, part in zip(totals[1:], parts[1:], strict=True):
      total[take] += part
  return totals


@pytest.mark.parametrize('form', ['interpreted', 'xla'])
def test_bfloat16_errs_at_most_twice_as_much_as_unshared_attention(form):
  group = _Group(200, (127, 60, 100, 25))
  used, row = group.prompt + sum(group.samples), _row(group)
  q, k, v, _, cotangent = _inputs(4, False, jnp.bfloat16)
  got = _value_and_grads(q, k, v, None, row, cotangent, form=form, options=_Options())
  wide = [x.astype(jnp.float32) for x in (q, k, v, cotangent)]
  exact = _unshared(*wide, group)
  unshared = _unshared(q, k, v, cotangent, group)

  def error(x, y):
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float32)[:used] - y[:used])))

  for ours, theirs, want in zip(got, unshared, exact, strict=True):
    assert ours.dtype == jnp.bfloat16
    assert 0 < error(theirs, want)
    assert error(ours, want) <= 2 * error(theirs, want)
