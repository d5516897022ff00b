"""The Hopper kernel of shared-prefix decode in the GPU interpreter, against float64; and lowered for CUDA."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlax_stack.pallas_kernels import dispatch, shared_prefix_decode_gpu
from rlax_stack.pallas_kernels.decode_work import PrefixView, decode_items, make_work_list
from rlax_stack.pallas_kernels.shared_prefix_decode import (
  KVScales,
  plan_decode,
  shared_prefix_decode,
  shared_prefix_decode_reference,
)

pytestmark = pytest.mark.skipif(
  not hasattr(plgpu, 'InterpretGPUParams'), reason='the GPU interpreter came with jax 0.12'
)
HOPPER = types.SimpleNamespace(platform='gpu', compute_capability='9.0', device_kind='NVIDIA H100')

_PAGE, _LAYERS = 64, 2
_A = PrefixView(pages=(3, 1, 0), length=150)
_B = PrefixView(pages=(2,), length=4)
_VIEWS = (_A, _B, None, _A, _A)
_SUFFIX = np.array([1, 8, 0, 32, 17], np.int32)
_LIVE = [i for i, view in enumerate(_VIEWS) if view]


def _arrays(heads=4, kv_heads=2, width=64, block=16):
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

  prefix = (_LAYERS, 4, kv_heads, _PAGE, width)
  suffix = (_LAYERS, 32 // block * len(_VIEWS), kv_heads, block, width)
  q = draw(len(_VIEWS), heads, width)
  return q, draw(*prefix), draw(*prefix), draw(*suffix), draw(*suffix)


def _pages(block=16):
  """Where rows keep their own tokens: anywhere."""
  per_row = 32 // block
  order = np.random.default_rng(1).permutation(per_row * len(_VIEWS))
  return order.reshape(len(_VIEWS), per_row).astype(np.int32)


def _lengths(views=_VIEWS):
  return np.array([view.length if view else 0 for view in views], np.int32)


def _work(views=_VIEWS, rows_per_block=4):
  work = make_work_list(views, page_size=_PAGE, rows_per_block=rows_per_block, max_items=16)
  return jax.tree.map(jnp.asarray, work)


@functools.partial(jax.jit, static_argnames=('window', 'soft_cap', 'options'))
def _decode(arrays, work, prefix_length, suffix_length, sinks=None, *, window, soft_cap, options):
  size = arrays[3].shape[3]
  plan = plan_decode(
    work,
    prefix_length,
    suffix_length,
    jnp.asarray(_pages(size)),
    suffix_page_size=size,
    window=window,
    implementation='pallas',
  )
  q, *tables = arrays
  with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**dict(options))):
    return shared_prefix_decode(q, *tables, plan, layer=1, soft_cap=soft_cap, sinks=sinks)


def _run(arrays, views=_VIEWS, suffix=_SUFFIX, rows_per_block=4, sinks=None, **kwargs):
  kwargs = {'window': None, 'soft_cap': None, 'options': ()} | kwargs
  return _decode(arrays, _work(views, rows_per_block), _lengths(views), suffix, sinks, **kwargs)


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch):
  monkeypatch.setattr(dispatch, 'target_device', lambda mesh: HOPPER)
  # So few rows would be dealt to more thread blocks, each of which takes its time in the interpreter.
  monkeypatch.setattr(shared_prefix_decode_gpu, '_MOST_SHARES', 3)


_CASES = {
  'one key head, no races': ((2, 1, 64, 16), {'options': (('detect_races', True),)}),
  'width 128, window, soft cap, sinks': ((4, 1, 128, 32), {'window': 70, 'soft_cap': 1.5}),
  'a head each, two rows to a block': ((2, 2, 64, 32), {'rows_per_block': 2, 'window': 6}),
}


@pytest.mark.parametrize('name', [*_CASES])
def test_equals_reference(name):
  sizes, options = _CASES[name]
  arrays = _arrays(*sizes)
  sinks = np.linspace(-2, 2, sizes[0]).astype(np.float32) if 'sinks' in name else None
  got = _run(arrays, sinks=sinks, **options)
  want = shared_prefix_decode_reference(
    *(np.asarray(x, np.float64) for x in arrays),
    _SUFFIX,
    _pages(sizes[3]),
    _VIEWS,
    layer=1,
    window=options.get('window'),
    soft_cap=options.get('soft_cap'),
    sinks=sinks,
  )
  assert np.isfinite(np.asarray(got, np.float32)).all()
  np.testing.assert_allclose(np.asarray(got, np.float64)[_LIVE], want[_LIVE], atol=1e-2)


def test_a_row_does_not_depend_on_its_neighbours():
  """Bit for bit, though the block of the row then has other items."""
  arrays = _arrays(2, 1)
  whole = _run(arrays)
  alone = (_A, None, None, None, None)
  row = _run(arrays, alone, np.array([1, 0, 0, 0, 0], np.int32))
  np.testing.assert_array_equal(np.asarray(row)[0], np.asarray(whole)[0])


def test_lowers_for_cuda():
  """Mosaic GPU takes the kernel: its layouts of registers and shared memory fit together."""
  for width, block, columns in ((64, 16, 8), (128, 32, 16)):
    q, *tables = _arrays(2 * columns, 2, width, block)
    items = jax.jit(functools.partial(decode_items, page_size=block, window=70))(
      _work(), _lengths(), _SUFFIX, _pages(block)
    )

    def run(q, tables, items=items):
      none = (None, None)
      state = shared_prefix_decode_gpu.softmax_state
      oldest = jnp.asarray(_lengths() + _SUFFIX - 70)
      rows = q.reshape(len(_VIEWS), 2, -1, q.shape[-1])
      tables = (*tables[:2], *none), (*tables[2:], *none)
      return state(rows, *tables, _work(), items, 0, oldest, 1.5)

    lowered = jax.jit(run).trace(q, tables).lower(lowering_platforms=('cuda',))
    assert lowered.as_text().count('@mosaic_gpu_v2') == 1


def test_auto_is_xla():
  lengths, sizes = (_lengths(), _SUFFIX, _pages()), {'suffix_page_size': 16}
  assert plan_decode(_work(), *lengths, **sizes).implementation == 'xla'
  chosen = plan_decode(_work(), *lengths, implementation='pallas', **sizes)
  assert chosen.on_gpu and chosen.items is not None


def test_what_it_has_not_is_refused_with_the_reason():
  q, *tables = _arrays()
  plan = plan_decode(
    _work(),
    _lengths(),
    _SUFFIX,
    _pages(),
    suffix_page_size=16,
    implementation='pallas',
  )
  whole = (x.astype(jnp.float32) for x in tables)
  with pytest.raises(ValueError, match='for bfloat16, and this is float32'):
    shared_prefix_decode(q.astype(jnp.float32), *whole, plan)
  scales = KVScales(*(jnp.ones(x.shape[:-1]) for x in tables))
  with pytest.raises(ValueError, match='reads no quantised keys and values'):
    shared_prefix_decode(q, *tables, plan, kv_scales=scales)
  none = (None, None)
  no_form = shared_prefix_decode_gpu.no_form
  small = (*(x[..., :8, :] for x in tables[2:]), *none)
  table = (*tables[:2], *none)
  assert no_form(table, (*tables[2:], *none), columns=128) is None
  assert 'suffix_page_size must be 16, 32 or a multiple of 64, got 8' in no_form(
    table, small, columns=8
  )
  assert 'at most 128, got 129' in no_form(table, (*tables[2:], *none), columns=129)
