"""Shared-prefix decode over any rows, against a float64 reference that reads every row by itself."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from rlax_stack.pallas_kernels import shared_prefix_decode_tpu
from rlax_stack.pallas_kernels.decode_work import PrefixView, decode_items, make_work_list
from rlax_stack.pallas_kernels.shared_prefix_decode import (
  DecodePlan,
  shared_prefix_decode,
  shared_prefix_decode_reference,
)

_PAGE, _BLOCK, _ROWS, _KV, _DIM, _PAGES = 128, 64, 17, 2, 8, 24

# Memory starts as NaN, reads outside of it raise, and races are found.
_STRICT = pltpu.InterpretParams(
  uninitialized_memory='nan', out_of_bounds_reads='raise', detect_races=True
)


class _Rows(NamedTuple):
  """A trunk of whole pages, and rows as (branch, tokens of the branch's pages read, own tokens).

  Rows of a branch share its pages, branches share the trunk: three levels. A row without own tokens is idle.
  """

  trunk_pages: int
  rows: tuple[tuple[int, int, int], ...]


class _Options(NamedTuple):
  window: int | None = None
  soft_cap: float | None = None
  with_sinks: bool = False


def _views(rows):
  """What each row reads: pages 0 and 1 are the trunk, then two for each of up to three branches, shuffled."""
  names = np.random.default_rng(1).permutation(_PAGES)
  views = []
  for branch, length, own in rows.rows:
    pages = [*range(rows.trunk_pages)] + [2 + 2 * branch + i for i in range(-(-length // _PAGE))]
    total = rows.trunk_pages * _PAGE + length
    views.append(PrefixView(pages=tuple(int(names[p]) for p in pages), length=total))
    if own == 0:
      views[-1] = None
  return views + [None] * (_ROWS - len(views))


# Where rows keep their own tokens: anywhere.
_OWN_PAGES = np.random.default_rng(2).permutation(3 * _ROWS).reshape(_ROWS, 3).astype(np.int32)


def _arrays(ratio):
  rng = np.random.default_rng(ratio)
  prefix, suffix = (1, _PAGES, _KV, _PAGE, _DIM), (1, 3 * _ROWS, _KV, _BLOCK, _DIM)
  shapes = [(_ROWS, _KV * ratio, _DIM), prefix, prefix, suffix, suffix]
  return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


@functools.partial(jax.jit, static_argnames=('form', 'window', 'soft_cap'))
def _run(arrays, work, prefix_length, own, sinks, *, form, window, soft_cap):
  items = None
  if form != 'xla':
    items = decode_items(work, prefix_length, own, _OWN_PAGES, page_size=_BLOCK, window=window)
  pages = jnp.asarray(_OWN_PAGES)
  oldest = None if window is None else prefix_length + own - window
  plan = DecodePlan(form, False, oldest, prefix_length, own, pages, work, items, None)
  return shared_prefix_decode(*arrays, plan, soft_cap=soft_cap, sinks=sinks)


def _decode(arrays, rows, rows_per_block, options, form):
  """What the form answers for the rows that decode, and the reference's views and own lengths."""
  views = _views(rows)
  own = np.array([n for *_, n in rows.rows] + [0] * (_ROWS - len(rows.rows)), np.int32)
  prefix_length = np.array([view.length if view else 0 for view in views], np.int32)
  work = make_work_list(views, page_size=_PAGE, rows_per_block=rows_per_block, max_items=128)
  sinks = np.linspace(-2, 2, arrays[0].shape[1]).astype(np.float32) if options.with_sinks else None
  state = functools.partial(
    shared_prefix_decode_tpu.softmax_state, interpret=_STRICT if form == 'strict' else True
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(shared_prefix_decode_tpu, 'softmax_state', state)
    static = {'form': form, 'window': options.window, 'soft_cap': options.soft_cap}
    got = _run(arrays, work, prefix_length, own, sinks, **static)
  return np.asarray(got.astype(jnp.float32)), (own, _OWN_PAGES, views), sinks


_LENGTHS = st.sampled_from([0, 1, 127, 128, 129, 200])


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 3, deadline=None, derandomize=True)
@given(
  rows=st.builds(
    _Rows,
    trunk_pages=st.integers(0, 2),
    rows=st.lists(
      st.tuples(st.integers(0, 2), _LENGTHS, st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129])),
      min_size=1,
      max_size=16,
    ).map(tuple),
  ),
  rows_per_block=st.sampled_from([1, 4, 16]),
  ratio=st.sampled_from([1, 4, 7, 8]),
  options=st.builds(
    _Options,
    window=st.sampled_from([None, 1, 100, 200]),
    soft_cap=st.sampled_from([None, 1.5]),
    with_sinks=st.booleans(),
  ),
  form=st.sampled_from(['interpreted', 'strict', 'xla']),
)
# Rows without a prompt.
@example(_Rows(0, ((0, 0, 1), (0, 0, 129), (1, 0, 64))), 4, 4, _Options(), 'interpreted')
@example(_Rows(0, ((0, 129, 65),) * 16), 16, 7, _Options(), 'strict')
@example(_Rows(2, ((0, 1, 1), (0, 129, 0), (1, 127, 64), (0, 129, 2))), 16, 1, _Options(), 'strict')
@example(_Rows(1, ((0, 128, 1), (1, 0, 127))), 1, 8, _Options(100, 1.5, True), 'interpreted')
# Nobody decodes.
@example(_Rows(1, ((2, 200, 0),)), 4, 4, _Options(), 'interpreted')
def test_any_rows_equal_rows_read_by_themselves(rows, rows_per_block, ratio, options, form):
  arrays = _arrays(ratio)
  got, read, sinks = _decode(arrays, rows, rows_per_block, options, form)
  rules = {'window': options.window, 'soft_cap': options.soft_cap, 'sinks': sinks}
  want = shared_prefix_decode_reference(*arrays, *read, **rules)
  live = [i for i, view in enumerate(read[-1]) if view]
  assert np.isfinite(got).all()
  np.testing.assert_allclose(got[live], want[live], atol=5e-6)


def _unshared(arrays, own, pages, views):
  """Row by row in bfloat16: float32 softmax and sums, weights rounded before they meet the values."""
  q, *tables = (np.asarray(x, np.float32) for x in arrays)
  out = np.zeros(q.shape, np.float32)
  for row, view in enumerate(views):
    if view is None:
      continue
    k, v = (
      np.concatenate([*prefix[0, list(view.pages)], *suffix[0, pages[row]]], 1)
      for prefix, suffix in ((tables[0], tables[2]), (tables[1], tables[3]))
    )
    index = np.arange(k.shape[1]) - len(view.pages) * _PAGE
    there = (index < view.length - len(view.pages) * _PAGE) | ((index >= 0) & (index < own[row]))
    scores = np.einsum('krd,ksd->krs', q[row].reshape(_KV, -1, _DIM), k[:, there]) * _DIM**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    rounded = np.asarray(jnp.asarray(weights, jnp.bfloat16), np.float32)
    values = np.einsum('krs,ksd->krd', rounded, v[:, there]) / weights.sum(-1)[..., None]
    out[row] = np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32).reshape(q[row].shape)
  return out


@pytest.mark.parametrize('form', ['interpreted', 'xla'])
def test_bfloat16_errs_at_most_twice_as_much_as_unshared_attention(form):
  rows = _Rows(1, tuple((i % 2, 129, 10 + 9 * i) for i in range(12)))
  arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in _arrays(4))
  got, read, _ = _decode(arrays, rows, 16, _Options(), form)
  exact = shared_prefix_decode_reference(*(np.asarray(x, np.float32) for x in arrays), *read)
  unshared = _unshared(arrays, *read)
  live = [i for i, view in enumerate(read[-1]) if view]

  def error(x):
    return np.sqrt(np.mean(np.square(x[live] - exact[live])))

  assert 0 < error(unshared) < 0.01
  assert error(got) <= 2 * error(unshared)
