"""Attention over packed trees: the one rule, and the choice of implementation.

Token i attends to token j iff j <= i < subtree_end[j] (and, with a window, positions[i] - positions[j] <
window). That covers causal attention, packed sequences, shared prompts and arbitrary prefix trees.

Not for the rows themselves (`tree_rows`). Invariant: a token that sees only itself and is seen by nobody else
(padding) neither reads nor writes anything of another token: NaN there reaches no other output and no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rlax_stack import sharding
from rlax_stack.errors import ConfigError
from rlax_stack.pallas_kernels import block_sizes, dispatch, tree_attention_tpu, tree_attention_xla
from rlax_stack.pallas_kernels.tree_rows import Kernel, Layout, attend_rows, dense, lay_out

Attend = Callable[..., jax.Array]


class AttentionShape(NamedTuple):
  """Heads of queries and of keys, the width of a head, and the dtype of q, k and v."""

  heads: int
  kv_heads: int
  head_dim: int
  dtype: Any


def tree_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  positions: jax.Array,
  subtree_end: jax.Array,
  *,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  scale: float | None = None,
  implementation: str = 'auto',
  mesh: Mesh | None = None,
) -> jax.Array:
  """Attends over rows of packed trees; differentiable in q, k, v and sinks.

  For one call. Layers that share their rows share the block tables too: see `prepare_tree_attention`.

  Args:
    q: [R, T, H, Dh], RoPE applied, unscaled; float32 or bfloat16.
    k, v: [R, T, K, Dh] in the dtype of q; K divides H (grouped or multi-query attention).
    positions: int32 [R, T], depth from the root; read only with a window.
    subtree_end: int32 [R, T], index just past the last token that may see token j; at least j + 1.
    window: a token sees less than this many positions back, itself included; None for no limit.
    soft_cap: scores become soft_cap * tanh(score / soft_cap), as in Gemma 2; None for none.
    sinks: float32 [H], a score per head that takes part in the softmax and has no value (gpt-oss); None for none.
    scale: of the scores; Dh ** -0.5 when None.
    implementation: 'auto', 'pallas' (TPU; Hopper GPUs for bfloat16 heads of width 64 and 128), 'xla'
      (block-structured, no T x T array), or 'reference' (dense). 'auto' is 'pallas' on a TPU and 'xla' elsewhere,
      on a Hopper GPU too: its kernels were never measured on one.
    mesh: splits rows over data, fsdp and expert, heads over tensor and the tokens of a row over context by shard_map,
      because neither kernels nor loops with a dynamic trip count are partitioned automatically. None: the
      arrays live whole on each device.

  Returns:
    [R, T, H, Dh] in the dtype of q. Softmax and sums are float32.

  Raises:
    ValueError: shapes or dtypes that do not fit, or an implementation that does not exist or is absent here.
    ConfigError: a mesh that the rows, heads or tokens do not divide over.
  """
  _check_arrays(q, k, v, positions)
  shape = AttentionShape(q.shape[2], k.shape[2], q.shape[3], q.dtype)
  attend = prepare_tree_attention(
    positions,
    subtree_end,
    shape=shape,
    window=window,
    soft_cap=soft_cap,
    scale=scale,
    implementation=implementation,
    mesh=mesh,
  )
  return attend(q, k, v, sinks)


def prepare_tree_attention(
  positions: jax.Array,
  subtree_end: jax.Array,
  *,
  shape: AttentionShape,
  window: int | None = None,
  soft_cap: float | None = None,
  scale: float | None = None,
  implementation: str = 'auto',
  mesh: Mesh | None = None,
  visits: int = 0,
  mixed: bool = False,
) -> Attend:
  """Makes the block tables of rows once, for every layer that attends over them.

  Args:
    positions: see `tree_attention`, as all that follow.
    subtree_end: int32 [R, T].
    shape: of the q, k and v to come.
    window: None for no limit.
    soft_cap: None for none.
    scale: None for Dh ** -0.5.
    implementation: 'auto', 'pallas', 'xla' or 'reference'.
    mesh: None for whole arrays.
    visits: block pairs per row that the kernels' cost estimates count; 0 counts all on or below the diagonal.
    mixed: some layers see all in spite of the window: the tables of both kinds are made, and each call takes those that
      the keyword `sees_all`, a bool scalar that may be traced, asks for.

  Returns:
    Function (q, k, v, sinks=None) -> [R, T, H, Dh]; with `mixed` it needs `sees_all` too.

  Raises:
    ValueError, ConfigError: see `tree_attention`.
  """
  _check_tree(positions, subtree_end, shape, window, soft_cap)
  kernel = _kernel(
    implementation,
    shape,
    tokens=positions.shape[1] // _parts(mesh),
    options={
      'scale': shape.head_dim**-0.5 if scale is None else float(scale),
      'window': window,
      'soft_cap': soft_cap,
    },
    mesh=mesh,
    visits=visits,
  )
  make, attend = functools.partial(lay_out, kernel), functools.partial(attend_rows, kernel)
  if mesh is not None and mesh.size > 1:
    make, attend = _sharded(kernel, positions, shape, mesh)
  layout = make(positions, subtree_end)
  if not mixed:
    return lambda q, k, v, sinks=None: attend(layout, q, k, v, sinks)
  # Tokens that all stand at one position are inside every window.
  whole = make(jnp.zeros_like(positions), subtree_end)

  def attend_as(q, k, v, sinks=None, *, sees_all):
    chosen = jax.tree.map(lambda a, b: jnp.where(sees_all, a, b), whole, layout)
    return attend(chosen, q, k, v, sinks)

  return attend_as


def _kernel(implementation, shape, *, tokens, options, mesh, visits) -> Kernel:
  """The form to take where a device has `tokens` queries of a row."""
  device = dispatch.target_device(mesh)
  on_gpu, absent = dispatch.is_gpu(device), dispatch.no_pallas(device, on_gpu=True)
  if on_gpu:
    absent = absent or dispatch.no_gpu_form(shape.dtype, shape.head_dim)
  chosen = dispatch.choose('tree attention', implementation, absent=absent, measured=not on_gpu)
  if chosen == 'pallas':
    return _gpu_kernel(options) if on_gpu else _tpu_kernel(device, shape, tokens, options, visits)
  spec = tree_attention_xla.XlaSpec(**options, parts=_parts(mesh))
  if chosen == 'reference':
    return Kernel(spec, 1, 1, lambda spec, kinds: (), dense)
  make, attend = tree_attention_xla.make_tables, tree_attention_xla.attend
  return Kernel(spec, spec.block, spec.block, make, attend, ring=True)


def _tpu_kernel(device, shape, tokens, options, visits) -> Kernel:
  blocks = block_sizes.tree_blocks(
    device.device_kind,
    group=shape.heads // shape.kv_heads,
    head_dim=shape.head_dim,
    itemsize=jnp.dtype(shape.dtype).itemsize,
    tokens=tokens,
  )
  spec = tree_attention_tpu.TpuSpec(
    **options, block_q=blocks.q, block_kv=blocks.kv, vmem_limit=blocks.vmem_limit, pairs=visits
  )
  make, attend = tree_attention_tpu.make_tables, tree_attention_tpu.attend
  return Kernel(spec, blocks.q, blocks.kv, make, attend)


def _gpu_kernel(options) -> Kernel:
  # Imported where it is chosen: Mosaic GPU takes a quarter of a second, and others have no use for it.
  from rlax_stack.pallas_kernels import tree_attention_gpu

  spec = tree_attention_gpu.GpuSpec(**options)
  make, attend = tree_attention_gpu.make_tables, tree_attention_gpu.attend
  return Kernel(spec, spec.block_q, spec.block_kv, make, attend)


def _check_arrays(q, k, v, positions):
  if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
    raise ValueError(
      f'q must be [R, T, H, Dh] and k, v [R, T, K, Dh], got {q.shape}, {k.shape}, {v.shape}.'
    )
  if k.shape != (*q.shape[:2], k.shape[2], q.shape[3]):
    raise ValueError(f'k and v must match q in R, T and Dh, got q {q.shape} and k {k.shape}.')
  if not q.dtype == k.dtype == v.dtype:
    raise ValueError(f'q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}.')
  if positions.shape != q.shape[:2]:
    raise ValueError(
      f'positions and subtree_end must be {q.shape[:2]}, got positions {positions.shape}.'
    )


def _check_tree(positions, subtree_end, shape, window, soft_cap):
  if positions.ndim != 2 or positions.shape != subtree_end.shape:
    raise ValueError(
      f'positions and subtree_end must be [R, T], got {positions.shape} and {subtree_end.shape}.'
    )
  if positions.dtype != jnp.int32 or subtree_end.dtype != jnp.int32:
    raise ValueError(
      f'positions and subtree_end must be int32, got {positions.dtype} and {subtree_end.dtype}.'
    )
  if shape.heads % shape.kv_heads:
    raise ValueError(
      f'the key heads must divide those of q, got {shape.heads} and {shape.kv_heads}.'
    )
  if window is not None and window < 1:
    raise ValueError(f'window must be at least 1 or None, got {window=}.')
  if soft_cap is not None and not soft_cap > 0:
    raise ValueError(f'soft_cap must be above 0 or None, got {soft_cap=}.')


def _sharded(kernel, positions, shape, mesh) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """`lay_out` and `attend_rows` under shard_map, with everything where `prepare_tree_attention` says.

  Over context every device answers its own queries. The XLA form passes the keys round a ring; the Pallas forms
  gather all keys of a row, and the gradient of the gather brings theirs back.
  """
  rules = sharding.DEFAULT_RULES
  by_head = rules.spec_for(('rows', 'tokens', 'heads', None))
  by_row, by_token = rules.spec_for(('rows', None)), rules.spec_for(('rows', 'tokens'))
  full = (*positions.shape, shape.heads, shape.head_dim)
  sharding.check_divisible('the queries (rows, tokens, heads, width)', full, by_head, mesh)
  full = (*positions.shape, shape.kv_heads, shape.head_dim)
  sharding.check_divisible('the keys', full, by_head, mesh)
  parts = _parts(mesh)
  queries = positions.shape[1] // parts
  if parts > 1 and (queries % kernel.block_q or kernel.attend is dense):
    raise ConfigError(
      f'rows of {positions.shape[1]} tokens over config.mesh.context = {parts} leave {queries} to a device, which '
      f'does not divide by blocks of {kernel.block_q} tokens. Set config.learner.row_length to a multiple of '
      f'{parts * kernel.block_q}.'
    )

  def tables_of(positions, subtree_end):
    if parts == 1:
      return lay_out(kernel, positions, subtree_end)
    first = lax.axis_index('context') * queries
    return lay_out(kernel, positions, subtree_end, first, queries)

  def attend_part(layout, q, k, v, sinks):
    if parts > 1 and not kernel.ring:
      k, v = (lax.all_gather(x, 'context', axis=1, tiled=True) for x in (k, v))
    return attend_rows(kernel, layout, q, k, v, sinks)

  # Tables differ between the parts of a row, so their leading axis is laid over context as well.
  of_part = P((*_axes(by_row[0]), 'context'))
  layout_specs = Layout._make([by_row, by_row, by_token, P('context'), of_part])
  # Unchecked, because loop carries start as constants, which vary over no axis.
  make = jax.shard_map(
    tables_of, mesh=mesh, in_specs=(by_row, by_row), out_specs=layout_specs, check_vma=False
  )

  def attend(layout, q, k, v, sinks):
    sink_spec = None if sinks is None else rules.spec_for(('heads',))
    return jax.shard_map(
      attend_part,
      mesh=mesh,
      in_specs=(layout_specs, by_head, by_head, by_head, sink_spec),
      out_specs=by_head,
      check_vma=False,
    )(layout, q, k, v, sinks)

  return make, attend


def _parts(mesh: Mesh | None) -> int:
  """Devices that the tokens of a row lie over."""
  return 1 if mesh is None else mesh.shape['context']


def _axes(entry) -> tuple[str, ...]:
  return (entry,) if isinstance(entry, str) else tuple(entry or ())
