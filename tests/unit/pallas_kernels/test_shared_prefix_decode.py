"""Shared-prefix decode attention against a float64 reference that reads every row by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.pallas_kernels.shared_prefix_decode import (
  PrefixView,
  make_work_list,
  shared_prefix_decode,
  shared_prefix_decode_reference,
)

_PAGE, _BLOCK, _KV, _HEADS, _DIM, _ROWS, _LAYERS = 4, 4, 2, 6, 8, 9, 2
_A = PrefixView(pages=(3, 1, 0), length=10)
_B = PrefixView(pages=(2,), length=4)
_C = PrefixView(pages=(5, 4), length=5)
_VIEWS = (_A, _B, _A, None, _A, _C, _A, _B, _A)
_SUFFIX = np.array([1, 8, 3, 0, 5, 4, 2, 1, 7], np.int32)


def _arrays(seed=0):
  random = np.random.default_rng(seed)

  def normal(*shape):
    return random.normal(size=shape).astype(np.float32)

  prefix, suffix = (_LAYERS, 6, _KV, _PAGE, _DIM), (_LAYERS, 2, _ROWS, _KV, _BLOCK, _DIM)
  return (
    normal(_ROWS, _HEADS, _DIM),
    normal(*prefix),
    normal(*prefix),
    normal(*suffix),
    normal(*suffix),
  )


def _work(views=_VIEWS, rows_per_block=2, max_items=24):
  return make_work_list(views, page_size=_PAGE, rows_per_block=rows_per_block, max_items=max_items)


def _prefix_length(views=_VIEWS):
  return np.array([view.length if view else 0 for view in views], np.int32)


_decode = jax.jit(shared_prefix_decode, static_argnames=('layer', 'window', 'scale'))


@pytest.mark.parametrize('window', [None, 1, 6])
@pytest.mark.parametrize('layer', [0, 1])
def test_equals_reference(window, layer):
  arrays = _arrays()
  got = _decode(*arrays, _prefix_length(), _SUFFIX, _work(), layer=layer, window=window)
  want = shared_prefix_decode_reference(*arrays, _SUFFIX, _VIEWS, layer=layer, window=window)
  live = [i for i, view in enumerate(_VIEWS) if view]
  np.testing.assert_allclose(np.asarray(got)[live], want[live], atol=2e-6)
  assert np.isfinite(np.asarray(got)).all()


def test_scale_is_applied():
  arrays = _arrays()
  got = _decode(*arrays, _prefix_length(), _SUFFIX, _work(), scale=0.05)
  want = shared_prefix_decode_reference(*arrays, _SUFFIX, _VIEWS, scale=0.05)
  np.testing.assert_allclose(np.asarray(got)[0], want[0], atol=2e-6)


def test_large_scores_stay_finite():
  q, *rest = _arrays()
  got = _decode(q * 1e3, *rest, _prefix_length(), _SUFFIX, _work())
  want = shared_prefix_decode_reference(q * 1e3, *rest, _SUFFIX, _VIEWS)
  np.testing.assert_allclose(np.asarray(got)[0], want[0], atol=1e-5)


def test_rows_do_not_depend_on_their_place():
  q, prefix_k, prefix_v, suffix_k, suffix_v = _arrays()
  order = np.random.default_rng(1).permutation(_ROWS)
  views = [_VIEWS[i] for i in order]
  got = _decode(q, prefix_k, prefix_v, suffix_k, suffix_v, _prefix_length(), _SUFFIX, _work())
  moved = _decode(
    q[order],
    prefix_k,
    prefix_v,
    suffix_k[:, :, order],
    suffix_v[:, :, order],
    _prefix_length(views),
    _SUFFIX[order],
    _work(views),
  )
  live = [i for i, row in enumerate(order) if _VIEWS[row]]
  np.testing.assert_array_equal(np.asarray(moved)[live], np.asarray(got)[order][live])


def test_bfloat16_keeps_float32_softmax():
  arrays = tuple(x.astype(jnp.bfloat16) for x in _arrays())
  got = _decode(*arrays, _prefix_length(), _SUFFIX, _work())
  assert got.dtype == jnp.bfloat16
  want = shared_prefix_decode_reference(
    *(np.asarray(x, np.float32) for x in arrays), _SUFFIX, _VIEWS
  )
  np.testing.assert_allclose(np.asarray(got, np.float32)[0], want[0], atol=3e-2)


def test_work_list_reads_each_page_once_per_block():
  work = _work()
  # A: 5 rows in 3 blocks x 3 pages; B: 2 rows in 1 block x 1 page; C: 1 row x 2 pages.
  assert int(work.num_items) == 9 + 1 + 2
  n = int(work.num_items)
  np.testing.assert_array_equal(work.item_page[:3], [3, 1, 0])
  np.testing.assert_array_equal(work.item_length[:3], [4, 4, 2])
  np.testing.assert_array_equal(work.item_start[:3], [0, 4, 8])
  np.testing.assert_array_equal(work.item_block[:n], [0] * 3 + [1] * 3 + [2] * 3 + [3, 4, 4])
  np.testing.assert_array_equal(work.block_rows[2], [8, 8])  # a short block repeats its last row
  for row, view in enumerate(_VIEWS):
    if view:
      assert work.block_rows[work.row_block[row], work.row_index[row]] == row


def test_whole_group_in_one_block_reads_its_prefix_once():
  assert int(_work(views=[_A] * 8, rows_per_block=8).num_items) == 3


def test_too_many_items_is_refused():
  with pytest.raises(ValueError, match='12 items but room for 11'):
    _work(max_items=11)
