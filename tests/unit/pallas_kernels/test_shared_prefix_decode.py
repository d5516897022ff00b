"""Shared-prefix decode attention against a float64 reference that reads every row by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rlax_stack import sharding
from rlax_stack.errors import ConfigError
from rlax_stack.pallas_kernels import shared_prefix_decode_tpu
from rlax_stack.pallas_kernels.decode_work import (
  SUFFIX,
  PrefixView,
  decode_items,
  make_work_list,
  rows_per_read,
)
from rlax_stack.pallas_kernels.shared_prefix_decode import (
  NO_WINDOW,
  KVScales,
  plan_decode,
  select_plan,
  shared_prefix_decode,
  shared_prefix_decode_reference,
)

_PAGE, _BLOCK, _KV, _HEADS, _DIM, _ROWS, _LAYERS = 4, 4, 2, 6, 8, 9, 2
_A = PrefixView(pages=(3, 1, 0), length=10)
_B = PrefixView(pages=(2,), length=4)
_C = PrefixView(pages=(5, 4), length=5)
_VIEWS = (_A, _B, _A, None, _A, _C, _A, _B, _A)
_SUFFIX = np.array([1, 8, 3, 0, 5, 4, 2, 1, 7], np.int32)
# Pages of the rows' own tokens lie anywhere.
_SUFFIX_PAGES = np.random.default_rng(2).permutation(2 * _ROWS).reshape(_ROWS, 2).astype(np.int32)
_OWN = (_SUFFIX, _SUFFIX_PAGES)
_LIVE = [i for i, view in enumerate(_VIEWS) if view]


def _arrays(seed=0):
  random = np.random.default_rng(seed)

  def normal(*shape):
    return random.normal(size=shape).astype(np.float32)

  prefix, suffix = (_LAYERS, 6, _KV, _PAGE, _DIM), (_LAYERS, 2 * _ROWS, _KV, _BLOCK, _DIM)
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


# Memory starts as NaN, reads outside of it raise, and races are found.
_STRICT = pltpu.InterpretParams(
  uninitialized_memory='nan', out_of_bounds_reads='raise', detect_races=True
)


@functools.partial(jax.jit, static_argnames=('window', 'form', 'scale', 'soft_cap', 'mesh'))
def _run(arrays, prefix_length, suffix, work, *, window, form, mesh=None, **options):
  plan = plan_decode(
    work,
    prefix_length,
    *suffix,
    suffix_page_size=arrays[3].shape[3],
    window=window,
    implementation='pallas' if form == 'pallas' else 'xla',
    mesh=mesh,
  )
  return shared_prefix_decode(*arrays, plan, **options)


@pytest.fixture(params=['xla', 'pallas'])
def decode(request, monkeypatch):
  """Function (arrays, prefix_length, (suffix_length, suffix_pages), work, **options); 'pallas' in interpret mode."""
  if request.param == 'pallas':
    state = shared_prefix_decode_tpu.softmax_state
    interpreted = functools.partial(state, interpret=True)
    monkeypatch.setattr(shared_prefix_decode_tpu, 'softmax_state', interpreted)
    monkeypatch.setattr('rlax_stack.pallas_kernels.dispatch.choose', lambda *a, **k: a[1])

  def run(q, prefix_k, prefix_v, suffix_k, suffix_v, prefix_length, suffix, work, **options):
    arrays = (q, prefix_k, prefix_v, suffix_k, suffix_v)
    options = {'window': None} | options
    return _run(arrays, prefix_length, suffix, work, form=request.param, **options)

  yield run
  _run.clear_cache()


@pytest.mark.parametrize('form', ['xla', 'pallas'])
def test_layers_of_both_kinds_take_their_own_plan(form, monkeypatch):
  if form == 'pallas':
    interpreted = functools.partial(shared_prefix_decode_tpu.softmax_state, interpret=True)
    monkeypatch.setattr(shared_prefix_decode_tpu, 'softmax_state', interpreted)
    monkeypatch.setattr('rlax_stack.pallas_kernels.dispatch.choose', lambda *a, **k: a[1])
  arrays = tuple(map(jnp.asarray, _arrays()))

  @jax.jit
  def decode(work, sees_all, layer):
    options = {'suffix_page_size': arrays[3].shape[3], 'implementation': form}
    whole, near = (
      plan_decode(work, _prefix_length(), *map(jnp.asarray, _OWN), window=window, **options)
      for window in (NO_WINDOW, 6)
    )
    return shared_prefix_decode(*arrays, select_plan(sees_all, whole, near), layer=layer)

  live = [i for i, view in enumerate(_VIEWS) if view]
  for sees_all, layer, window in ((True, 0, None), (False, 1, 6)):
    got = decode(_work(), jnp.asarray(sees_all), jnp.int32(layer))
    want = shared_prefix_decode_reference(*_arrays(), *_OWN, _VIEWS, layer=layer, window=window)
    np.testing.assert_allclose(np.asarray(got)[live], want[live], atol=2e-6)


@pytest.mark.parametrize('window', [None, 1, 6])
@pytest.mark.parametrize('layer', [0, 1])
def test_equals_reference(window, layer, decode):
  arrays = _arrays()
  got = decode(*arrays, _prefix_length(), _OWN, _work(), layer=layer, window=window)
  want = shared_prefix_decode_reference(*arrays, *_OWN, _VIEWS, layer=layer, window=window)
  live = [i for i, view in enumerate(_VIEWS) if view]
  np.testing.assert_allclose(np.asarray(got)[live], want[live], atol=2e-6)
  assert np.isfinite(np.asarray(got)).all()


def test_scale_is_applied(decode):
  arrays = _arrays()
  got = decode(*arrays, _prefix_length(), _OWN, _work(), scale=0.05)
  want = shared_prefix_decode_reference(*arrays, *_OWN, _VIEWS, scale=0.05)
  np.testing.assert_allclose(np.asarray(got)[0], want[0], atol=2e-6)


@pytest.mark.parametrize('window', [None, 6])
def test_soft_cap_and_sinks_equal_reference(decode, window):
  arrays, sinks = _arrays(), np.linspace(-2, 2, _HEADS).astype(np.float32)
  options = {'window': window, 'soft_cap': 1.5, 'sinks': sinks}
  got = decode(*arrays, _prefix_length(), _OWN, _work(), **options)
  want = shared_prefix_decode_reference(*arrays, *_OWN, _VIEWS, **options)
  np.testing.assert_allclose(np.asarray(got)[_LIVE], want[_LIVE], atol=2e-6)


@pytest.mark.parametrize('dtype', [jnp.int8, jnp.float8_e4m3fn])
def test_quantised_keys_and_values_are_scaled(decode, dtype):
  """What is read is the quantised value times its scale: the reference reads just that."""
  q, *tables = _arrays()
  top = 127 if dtype == jnp.int8 else 448
  scales = [np.abs(x).max(-1) / top for x in tables]
  low = [(x / s[..., None]) for x, s in zip(tables, scales, strict=True)]
  low = [jnp.asarray(np.rint(x) if dtype == jnp.int8 else x).astype(dtype) for x in low]
  exact = [np.asarray(x, np.float32) * s[..., None] for x, s in zip(low, scales, strict=True)]
  kv_scales = KVScales(*(s.astype(np.float32) for s in scales))
  got = decode(q, *low, _prefix_length(), _OWN, _work(), kv_scales=kv_scales)
  want = shared_prefix_decode_reference(q, *exact, *_OWN, _VIEWS)
  np.testing.assert_allclose(np.asarray(got)[_LIVE], want[_LIVE], atol=2e-5)


def test_heads_over_tensor_equal_whole_ones(decode):
  mesh = sharding.make_mesh({'tensor': 2, 'data': 2}, jax.devices()[:4])
  arrays, sinks = _arrays(), jnp.linspace(-2, 2, _HEADS)
  split = decode(*arrays, _prefix_length(), _OWN, _work(), sinks=sinks, mesh=mesh)
  whole = decode(*arrays, _prefix_length(), _OWN, _work(), sinks=sinks)
  np.testing.assert_allclose(split, whole, atol=1e-6)
  assert split.sharding.spec[1] == 'tensor'
  odd = sharding.make_mesh({'tensor': 4}, jax.devices()[:4])
  with pytest.raises(ConfigError, match='dimension 1 of the queries .* size 6'):
    decode(*arrays, _prefix_length(), _OWN, _work(), mesh=odd)


def test_rows_of_a_tree_read_common_pages_once(decode):
  """Two branches of one trunk, and a row that ends inside it."""
  trunk = (3, 1)
  views = (
    PrefixView(pages=(*trunk, 0, 4), length=14),
    PrefixView(pages=(*trunk, 5), length=11),
    None,
    PrefixView(pages=(*trunk, 0, 4), length=14),
    PrefixView(pages=(*trunk,), length=7),
    PrefixView(pages=(2,), length=3),
    PrefixView(pages=(*trunk, 0), length=12),
    None,
    None,
  )
  suffix = np.array([2, 1, 0, 8, 3, 4, 5, 0, 0], np.int32)
  work = _work(views, rows_per_block=8)
  n = int(work.num_items)
  # The trunk's first page for all; its second to its end, or less for the short row; then the branches.
  assert int(work.block_rows[0, 0]) == 4
  read = list(
    zip(*(x[:n].tolist() for x in (*work[:3], work.item_first, work.item_last)), strict=True)
  )
  assert read == [
    (3, 0, 4, 0, 5),
    (1, 4, 3, 0, 1),
    (1, 4, 4, 1, 5),
    (0, 8, 4, 1, 4),
    (5, 8, 3, 4, 5),
    (4, 12, 2, 2, 4),
    (2, 0, 3, 0, 1),
  ]
  arrays = _arrays()
  own = (suffix, _SUFFIX_PAGES)
  got = decode(*arrays, _prefix_length(views), own, work)
  want = shared_prefix_decode_reference(*arrays, *own, views)
  live = [i for i, view in enumerate(views) if view]
  np.testing.assert_allclose(np.asarray(got)[live], want[live], atol=2e-6)


@pytest.mark.parametrize('window', [None, 6])
def test_kernel_reads_nothing_uninitialised_out_of_bounds_or_in_a_race(window):
  q, *tables = (jnp.asarray(x) for x in _arrays())
  work = _work()
  sizes = {'page_size': _BLOCK, 'window': window}
  items = jax.jit(functools.partial(decode_items, **sizes))(work, _prefix_length(), *_OWN)
  oldest = None if window is None else jnp.asarray(_prefix_length() + _SUFFIX - window)
  q4 = (q * _DIM**-0.5).reshape(_ROWS, _KV, -1, _DIM)
  none = (None, None)
  # What lies past the lengths is NaN and must not get in.
  page = jnp.arange(_PAGE)[:, None]
  prefix = [tables[0].at[:, 0].set(jnp.where(page < 2, tables[0][:, 0], jnp.nan)), tables[1]]
  prefix[1] = prefix[1].at[:, 0].set(jnp.where(page < 2, prefix[1][:, 0], jnp.nan))
  state = jax.jit(
    functools.partial(shared_prefix_decode_tpu.softmax_state, soft_cap=None, interpret=_STRICT)
  )
  top, total, values = state(q4, (*prefix, *none), (*tables[2:], *none), work, items, 1, oldest)
  out = (values / jnp.where(total == 0, 1, total)[..., None]).reshape(q.shape)
  want = shared_prefix_decode_reference(*_arrays(), *_OWN, _VIEWS, layer=1, window=window)
  np.testing.assert_allclose(np.asarray(out)[_LIVE], want[_LIVE], atol=2e-6)
  assert np.isfinite(np.asarray(top)).all()


def test_items_are_those_that_are_needed_in_the_order_of_their_blocks():
  work = _work()
  items = decode_items(work, _prefix_length(), *_OWN, page_size=_BLOCK)
  n = int(items.count)
  assert n == int(work.num_items) + int(sum(-(-_SUFFIX // _BLOCK)))
  assert (np.diff(np.asarray(items.block)[:n]) >= 0).all()
  suffix = [i for i in range(n) if int(items.kind[i]) == SUFFIX]
  lengths = {row: 0 for row in range(_ROWS)}
  for i in suffix:
    row, _ = map(int, np.argwhere(_SUFFIX_PAGES == int(items.suffix_page[i]))[0])
    assert int(items.start[i]) == _prefix_length()[row] + lengths[row]
    assert int(items.first[i]) == work.row_index[row]
    lengths[row] += int(items.length[i])
  assert list(lengths.values()) == _SUFFIX.tolist()
  # A suffix item keeps the prefix page before it, so that nothing is fetched.
  pages, kinds = np.asarray(items.prefix_page)[:n], np.asarray(items.kind)[:n]
  for i in range(1, n):
    if kinds[i] == SUFFIX:
      assert pages[i] == pages[i - 1]
  windowed = decode_items(work, _prefix_length(), *_OWN, page_size=_BLOCK, window=1)
  assert int(windowed.count) == sum(view is not None for view in _VIEWS)


def test_large_scores_stay_finite(decode):
  q, *rest = _arrays()
  got = decode(q * 1e3, *rest, _prefix_length(), _OWN, _work())
  want = shared_prefix_decode_reference(q * 1e3, *rest, *_OWN, _VIEWS)
  np.testing.assert_allclose(np.asarray(got)[0], want[0], atol=1e-5)


def test_rows_do_not_depend_on_their_place(decode):
  q, prefix_k, prefix_v, suffix_k, suffix_v = _arrays()
  order = np.random.default_rng(1).permutation(_ROWS)
  views = [_VIEWS[i] for i in order]
  got = decode(q, prefix_k, prefix_v, suffix_k, suffix_v, _prefix_length(), _OWN, _work())
  moved = decode(
    q[order],
    prefix_k,
    prefix_v,
    suffix_k,
    suffix_v,
    _prefix_length(views),
    (_SUFFIX[order], _SUFFIX_PAGES[order]),
    _work(views),
  )
  live = [i for i, row in enumerate(order) if _VIEWS[row]]
  np.testing.assert_array_equal(np.asarray(moved)[live], np.asarray(got)[order][live])


def test_bfloat16_keeps_float32_softmax(decode):
  arrays = tuple(x.astype(jnp.bfloat16) for x in _arrays())
  got = decode(*arrays, _prefix_length(), _OWN, _work())
  assert got.dtype == jnp.bfloat16
  want = shared_prefix_decode_reference(*(np.asarray(x, np.float32) for x in arrays), *_OWN, _VIEWS)
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


@pytest.mark.parametrize(
  ('group', 'prompt', 'sample', 'rows'),
  [
    (1, 4096, 16, 1),  # nobody to share with
    (2, 64, 512, 2),  # (2 * 64 + 2 * 256) / (64 + 2 * 256) = 1.11
    (2, 60, 512, 2),
    (2, 50, 512, 1),
    (5, 2048, 512, 5),
    (16, 2048, 512, 8),
    (8, 8, 4096, 1),
  ],
)
def test_reads_are_shared_where_that_saves_a_tenth(group, prompt, sample, rows):
  own, reads = group * sample / 2, -(-group // 8)
  saved = (group * prompt + own) / (reads * prompt + own)
  assert rows_per_read(group, prompt, sample) == rows == (min(group, 8) if saved >= 1.1 else 1)


def test_too_many_items_is_refused():
  with pytest.raises(ValueError, match='12 items but room for 11'):
    _work(max_items=11)
