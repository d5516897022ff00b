"""Shared-prefix decode compiled by libtpu at the shapes of real models."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.pallas_kernels import dispatch, shared_prefix_decode_tpu
from rlax_stack.pallas_kernels.decode_work import PrefixView, decode_items, make_work_list

pytest.importorskip('libtpu')

_PAGE, _BLOCK, _LAYERS, _PAGES = 128, 64, 4, 512


def _step(window, scaled, work):
  def step(q, prefix_k, prefix_v, suffix_k, suffix_v, prefix_length, suffix_length, pages):
    items = decode_items(work, prefix_length, suffix_length, pages, page_size=_BLOCK, window=window)
    oldest = None if window is None else prefix_length + suffix_length - window

    def layer(index, q):
      def scale(x):
        return jnp.ones(x.shape[:-1], jnp.float32) if scaled else None

      prefix = (prefix_k, prefix_v, scale(prefix_k), scale(prefix_v))
      suffix = (suffix_k, suffix_v, scale(suffix_k), scale(suffix_v))
      _, total, values = shared_prefix_decode_tpu.softmax_state(
        q, prefix, suffix, work, items, index, oldest, None
      )
      return (values / jnp.maximum(total, 1)[..., None]).astype(q.dtype)

    return jax.lax.fori_loop(0, _LAYERS, layer, q)

  return step


# Key heads, query heads to each, width: Llama-3-8B and Qwen3-8B, Llama-3-70B and Qwen3-32B, Qwen2.5-7B.
_HEADS = [(8, 4, 128), (8, 8, 128), (4, 7, 128)]
_PLAIN = [
  (generation, heads, jnp.bfloat16, None)
  for generation in ('v5e', 'v5p', 'v6e', 'tpu7x')
  for heads in _HEADS
]


@pytest.mark.parametrize(
  ('generation', 'heads', 'dtype', 'window'),
  [
    *_PLAIN,
    ('v5p', (8, 8, 128), jnp.bfloat16, 4096),
    ('v5e', (8, 8, 64), jnp.bfloat16, 128),
    ('v5e', (2, 4, 256), jnp.float32, None),
    ('v6e', (8, 4, 128), jnp.int8, None),
    ('tpu7x', (8, 4, 128), jnp.float8_e4m3fn, None),
  ],
)
def test_groups_of_sixteen(generation, heads, dtype, window, make_tpu_mesh, compile_for, vmem_of):
  kv_heads, ratio, width = heads
  slots, per_row, per_prompt = 64, 16, 2048 // _PAGE
  views = [
    PrefixView(pages=tuple(range(g * per_prompt, (g + 1) * per_prompt)), length=2048)
    for g in range(4)
    for _ in range(16)
  ]
  work = make_work_list(views, page_size=_PAGE, rows_per_block=16, max_items=_PAGES)
  assert int(work.num_items) == 4 * per_prompt  # each page once per group
  mesh = make_tpu_mesh(generation)
  q_dtype = dtype if dtype in (jnp.bfloat16, jnp.float32) else jnp.bfloat16
  prefix = ((_LAYERS, _PAGES, kv_heads, _PAGE, width), dtype, ())
  suffix = ((_LAYERS, per_row * slots, kv_heads, _BLOCK, width), dtype, ())
  lengths = ((slots,), jnp.int32, ())
  compiled = compile_for(
    mesh,
    _step(window, q_dtype != dtype, jax.tree.map(np.asarray, work)),
    quick=True,
    q=((slots, kv_heads, ratio, width), q_dtype, ()),
    prefix_k=prefix,
    prefix_v=prefix,
    suffix_k=suffix,
    suffix_v=suffix,
    prefix_length=lengths,
    suffix_length=lengths,
    pages=((slots, per_row), jnp.int32, ()),
  )
  # Two pages of keys and of values, of prefixes and of suffixes; queries, their softmax, and room to work.
  pages = 2 * 2 * kv_heads * (_PAGE + _BLOCK) * max(width, 128) * jnp.dtype(dtype).itemsize
  state = 2 * kv_heads * 16 * ratio * (2 * 128 + 2 * width) * 4
  assert vmem_of(compiled)['shared_prefix_decode'] < pages + state + (2 << 20)
  assert dispatch.target_device(mesh).platform == 'tpu'
  # Neither table is copied: a step holds less than one layer of them. Heads of 64 are laid out anew in 128 lanes.
  if width >= 128:
    table = math.prod(prefix[0]) * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < table // _LAYERS + (64 << 20)
