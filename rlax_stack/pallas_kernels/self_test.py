"""Runs each Pallas kernel once on the device at hand and compares it with its XLA form, on small shapes.

Compilers have miscompiled kernels in silence; a run that starts with a wrong kernel trains on noise. Costs a few
compilations. Not for devices without Pallas kernels: nothing is run there.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.errors import KernelError
from rlax_stack.pallas_kernels import (
  dispatch,
  fused_log_prob,
  fused_log_prob_tpu,
  shared_prefix_decode,
  shared_prefix_decode_tpu,
  tree_attention_tpu,
  tree_attention_xla,
  tree_rows,
)
from rlax_stack.pallas_kernels.decode_work import PrefixView, decode_items, make_work_list

_TOLERANCE = (
  2e-2  # of values around 1 whose products are float32, whatever the device makes of them
)


class Deviation(NamedTuple):
  """What a kernel's results are and should be: trees of arrays, alike."""

  got: Any
  want: Any


def check_kernels(implementation: str = 'auto', *, interpret: Any = None) -> tuple[str, ...]:
  """Compares every kernel that is chosen on the default device with its XLA form.

  Args:
    implementation: 'auto' or 'pallas', as the run will ask for.
    interpret: runs the TPU kernels in interpret mode wherever this is; None runs what is chosen here.

  Returns:
    Names of the kernels that were compared.

  Raises:
    KernelError: a kernel whose results are not finite or differ from those of its XLA form.
  """
  device = dispatch.target_device(None)
  if interpret is not None or dispatch.no_pallas(device) is None:
    return compare(
      {
        'tree attention': _tree_attention,
        'shared-prefix decode': _shared_prefix_decode,
        'fused log-prob': _fused_log_prob,
      },
      interpret or False,
    )
  if implementation == 'pallas' and dispatch.no_pallas(device, on_gpu=True) is None:
    from rlax_stack.pallas_kernels import self_test_gpu  # Mosaic GPU is slow to import

    return compare(self_test_gpu.KERNELS, False)
  return ()


def compare(kernels: Mapping[str, Callable[[Any], Deviation]], interpret: Any) -> tuple[str, ...]:
  """Runs kernels, each with `interpret`.

  Returns:
    Their names.

  Raises:
    KernelError: one whose results are not finite or not what they should be.
  """
  for name, run in kernels.items():
    found = jax.jit(functools.partial(run, interpret))()
    gaps = [
      np.max(np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)))
      for got, want in zip(*map(jax.tree.leaves, found), strict=True)
    ]
    worst = float(np.max(gaps))
    if not worst <= _TOLERANCE:  # NaN is never within it
      raise KernelError(
        f'{name} differs by {worst:g} from its XLA form on {dispatch.target_device(None).device_kind}, more than '
        f'{_TOLERANCE:g}: this device, its compiler or their versions do not fit. Set config.model.kernels=xla.'
      )
  return tuple(kernels)


def _draw(seed: int, *shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _tree_attention(interpret: Any) -> Deviation:
  """Output and gradients over two groups, one of them of one sample."""
  ends = np.repeat([256, 180, 256], [100, 80, 76])[None].astype(np.int32)
  positions = np.concatenate([np.arange(180), 100 + np.arange(76)])[None].astype(np.int32)
  q, k, v = _draw(0, 1, 256, 4, 128), _draw(1, 1, 256, 2, 128), _draw(2, 1, 256, 2, 128)
  options = {'scale': 0.1, 'window': 150, 'soft_cap': 5.0}

  def run(spec, block, module):
    kernel = tree_rows.Kernel(spec, block, block, module.make_tables, module.attend)

    def attend(q, k, v):
      layout = tree_rows.lay_out(kernel, jnp.asarray(positions), jnp.asarray(ends))
      return tree_rows.attend_rows(kernel, layout, q, k, v, jnp.arange(4.0) - 1.5)

    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(q)

  spec = tree_attention_tpu.TpuSpec(
    **options, block_q=128, block_kv=128, vmem_limit=1 << 24, interpret=interpret
  )
  return Deviation(
    run(spec, 128, tree_attention_tpu),
    run(tree_attention_xla.XlaSpec(**options), 64, tree_attention_xla),
  )


def _shared_prefix_decode(interpret: Any) -> Deviation:
  """Three rows of two prompts, of which one page is shared."""
  views = [PrefixView(pages=(1, 0), length=150), PrefixView(pages=(2,), length=9)]
  views = [views[0], views[1], views[0]]
  work = make_work_list(views, page_size=128, rows_per_block=4, max_items=8)
  work = jax.tree.map(jnp.asarray, work)
  prefix_length, suffix_length = jnp.asarray([150, 9, 150]), jnp.asarray([1, 70, 64])
  prefix = (_draw(3, 1, 3, 2, 128, 128), _draw(4, 1, 3, 2, 128, 128))
  suffix = (_draw(5, 1, 6, 2, 64, 128), _draw(6, 1, 6, 2, 64, 128))
  suffix_pages = jnp.asarray([[4, 0], [1, 5], [2, 3]], jnp.int32)
  q = _draw(7, 3, 4, 128)
  plan = shared_prefix_decode.plan_decode(
    work, prefix_length, suffix_length, suffix_pages, suffix_page_size=64, implementation='xla'
  )
  want = shared_prefix_decode.shared_prefix_decode(q, *prefix, *suffix, plan, scale=0.1)
  items = decode_items(work, prefix_length, suffix_length, suffix_pages, page_size=64)
  none = (None, None)
  _, total, values = shared_prefix_decode_tpu.softmax_state(
    (0.1 * q).reshape(3, 2, 2, 128),
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


def _fused_log_prob(interpret: Any) -> Deviation:
  """Rows, vocabulary and width that blocks do not fill evenly."""
  hidden, head = _draw(8, 70, 256) / 4, _draw(9, 300, 256) / 4
  targets = jnp.arange(70, dtype=jnp.int32) * 4
  want = fused_log_prob.fused_log_prob(hidden, head, targets, implementation='xla')
  spec = fused_log_prob_tpu.TpuSpec(rows=128, entries=128, width=128, interpret=interpret)
  top, total, spread, chosen = fused_log_prob_tpu.softmax_state(
    spec, hidden, targets, jnp.ones(70), head, soft_cap=None
  )
  lse = top + jnp.log(total)
  return Deviation((chosen - lse, jnp.log(total) - spread / total, lse), tuple(want[:3]))
