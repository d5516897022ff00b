"""The kernels for Hopper GPUs and their XLA forms on small shapes, for `self_test`.

Not for the comparison itself. The XLA forms take the same bfloat16 values in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.pallas_kernels import (
  shared_prefix_decode,
  shared_prefix_decode_gpu,
  tree_attention_gpu,
  tree_attention_xla,
  tree_rows,
)
from rlax_stack.pallas_kernels.decode_work import PrefixView, decode_items, make_work_list
from rlax_stack.pallas_kernels.self_test import Deviation


def _draw(seed: int, *shape: int) -> jax.Array:
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(values / 2, jnp.bfloat16)


def _tree_attention(interpret: Any) -> Deviation:
  """Output and gradients over two groups, one of them of one sample."""
  ends = np.repeat([256, 180, 256], [100, 80, 76])[None].astype(np.int32)
  positions = np.concatenate([np.arange(180), 100 + np.arange(76)])[None].astype(np.int32)
  arrays = _draw(0, 1, 256, 2, 64), _draw(1, 1, 256, 1, 64), _draw(2, 1, 256, 1, 64)
  options = {'scale': 0.25, 'window': 150, 'soft_cap': 5.0}

  def run(spec, block, module, dtype):
    kernel = tree_rows.Kernel(spec, block, block, module.make_tables, module.attend)

    def attend(q, k, v):
      layout = tree_rows.lay_out(kernel, jnp.asarray(positions), jnp.asarray(ends))
      return tree_rows.attend_rows(kernel, layout, q, k, v, jnp.arange(2.0) - 0.5)

    out, pull = jax.vjp(attend, *(x.astype(dtype) for x in arrays))
    return out, pull(arrays[0].astype(dtype))

  spec = tree_attention_gpu.GpuSpec(**options, interpret=interpret)
  return Deviation(
    run(spec, 128, tree_attention_gpu, jnp.bfloat16),
    run(tree_attention_xla.XlaSpec(**options), 64, tree_attention_xla, jnp.float32),
  )


def _shared_prefix_decode(interpret: Any) -> Deviation:
  """Three rows of two prompts, of which one page is shared."""
  views = [PrefixView(pages=(1, 0), length=100), PrefixView(pages=(2,), length=9)]
  views = [views[0], views[1], views[0]]
  work = make_work_list(views, page_size=64, rows_per_block=4, max_items=8)
  work = jax.tree.map(jnp.asarray, work)
  prefix_length, suffix_length = jnp.asarray([100, 9, 100]), jnp.asarray([1, 30, 17])
  prefix = (_draw(3, 1, 3, 1, 64, 64), _draw(4, 1, 3, 1, 64, 64))
  suffix = (_draw(5, 1, 6, 1, 16, 64), _draw(6, 1, 6, 1, 16, 64))
  suffix_pages = jnp.asarray([[4, 0], [1, 5], [2, 3]], jnp.int32)
  q = _draw(7, 3, 2, 64)
  plan = shared_prefix_decode.plan_decode(
    work, prefix_length, suffix_length, suffix_pages, suffix_page_size=16, implementation='xla'
  )
  q_32, *tables = (x.astype(jnp.float32) for x in (q, *prefix, *suffix))
  k, v, own_k, own_v = tables
  want = shared_prefix_decode.shared_prefix_decode(q_32, k, v, own_k, own_v, plan, scale=1.0)
  items = decode_items(work, prefix_length, suffix_length, suffix_pages, page_size=16)
  none = (None, None)
  _, total, values = shared_prefix_decode_gpu.softmax_state(
    q.reshape(3, 1, 2, 64),
    (*prefix, *none),
    (*suffix, *none),
    work,
    items,
    0,
    None,
    None,
    interpret=interpret,
  )
  return Deviation((values / total[..., None]).reshape(q.shape), want)


KERNELS = {'tree attention': _tree_attention, 'shared-prefix decode': _shared_prefix_decode}
