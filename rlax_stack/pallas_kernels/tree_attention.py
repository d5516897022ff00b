"""Attention over packed trees: the one rule, its plain reference, and the choice of implementation.

Token i attends to token j iff j <= i < subtree_end[j] (and, with a window, positions[i] - positions[j] <
window). That covers causal attention, packed sequences, shared prompts and arbitrary prefix trees.

Invariant: a token that sees only itself and is seen by nobody else (padding) neither reads nor writes anything
of another token: NaN there reaches no other output and no gradient.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from rlax_stack import sharding
from rlax_stack.errors import ConfigError
from rlax_stack.pallas_kernels.tree_attention_xla import tree_attention_xla

IMPLEMENTATIONS = ('auto', 'xla', 'reference')


def tree_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  positions: jax.Array,
  subtree_end: jax.Array,
  *,
  window: int | None = None,
  scale: float | None = None,
  implementation: str = 'auto',
  mesh: Mesh | None = None,
) -> jax.Array:
  """Attends over rows of packed trees; differentiable in q, k and v.

  Args:
    q: [R, T, H, Dh], RoPE applied, unscaled; float32 or bfloat16.
    k, v: [R, T, K, Dh] in the dtype of q; K divides H (grouped or multi-query attention).
    positions: int32 [R, T], depth from the root; read only with a window.
    subtree_end: int32 [R, T], index just past the last token that may see token j; at least j + 1.
    window: a token sees less than this many positions back, itself included; None for no limit.
    scale: of the scores; Dh ** -0.5 when None.
    implementation: 'auto' (which is 'xla'), 'xla' (block-structured, no T x T array), or 'reference' (dense).
    mesh: splits rows over data and fsdp and heads over tensor by shard_map, because a loop with a dynamic trip
      count is not partitioned automatically. None: the arrays live whole on each device.

  Returns:
    [R, T, H, Dh] in the dtype of q. Softmax and sums are float32.

  Raises:
    ValueError: shapes or dtypes that do not fit, or an implementation that does not exist.
    ConfigError: a mesh that the rows or heads do not divide over, or a split context axis.
  """
  _check(q, k, v, positions, subtree_end, window, implementation)
  attend = functools.partial(
    _attend_rows,
    window=window,
    scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
    dense=implementation == 'reference',
  )
  if mesh is None or mesh.size == 1:
    return attend(q, k, v, positions, subtree_end)
  return _sharded(attend, mesh, q, k)(q, k, v, positions, subtree_end)


def _check(q, k, v, positions, subtree_end, window, implementation):
  if implementation == 'pallas':
    raise ValueError(
      "implementation 'pallas' does not exist for tree attention. Choose 'auto', 'xla' or 'reference'."
    )
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f'unknown {implementation=}. Choose from {", ".join(IMPLEMENTATIONS)}.')
  if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
    raise ValueError(
      f'q must be [R, T, H, Dh] and k, v [R, T, K, Dh], got {q.shape}, {k.shape}, {v.shape}.'
    )
  if k.shape != (*q.shape[:2], k.shape[2], q.shape[3]) or q.shape[2] % k.shape[2]:
    raise ValueError(
      f'k and v must match q in R, T and Dh, and their heads divide those of q, '
      f'got q {q.shape} and k {k.shape}.'
    )
  if positions.shape != q.shape[:2] or subtree_end.shape != q.shape[:2]:
    raise ValueError(
      f'positions and subtree_end must be {q.shape[:2]}, '
      f'got {positions.shape} and {subtree_end.shape}.'
    )
  if positions.dtype != jnp.int32 or subtree_end.dtype != jnp.int32:
    raise ValueError(
      f'positions and subtree_end must be int32, got {positions.dtype} and {subtree_end.dtype}.'
    )
  if not q.dtype == k.dtype == v.dtype:
    raise ValueError(f'q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}.')
  if window is not None and window < 1:
    raise ValueError(f'window must be at least 1 or None, got {window=}.')


def _attend_rows(q, k, v, positions, subtree_end, *, window, scale, dense):
  """Whole rows on one device: tokens alone in their tree are answered here, the rest by a kernel."""
  index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
  ends = jnp.maximum(subtree_end, index + 1)
  reach = lax.cummax(ends, axis=1)
  seen_before = jnp.pad(reach[:, :-1], ((0, 0), (1, 0))) > index
  alone = ~seen_before & (ends == index + 1)
  ends = jnp.where(alone, 0, ends)  # the kernels leave such tokens out
  apart = alone[:, :, None, None]
  kernel = tree_attention_reference if dense else tree_attention_xla
  masked_q, masked_k, masked_v = (jnp.where(apart, 0, x) for x in (q, k, v))
  out = kernel(masked_q, masked_k, masked_v, positions, ends, window=window, scale=scale)
  own = jnp.repeat(v, q.shape[2] // k.shape[2], axis=2)
  return jnp.where(apart, own, out)


def tree_attention_reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  positions: jax.Array,
  subtree_end: jax.Array,
  *,
  window: int | None,
  scale: float,
) -> jax.Array:
  """The rule as a dense mask and a float32 softmax; O(T^2) memory.

  Shapes as in `tree_attention`. A token with `subtree_end[j] <= j` is left out: it sees nobody and its output
  is 0.
  """
  rows, tokens, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  index = jnp.arange(tokens, dtype=jnp.int32)
  seen = (index[None, None] <= index[None, :, None]) & (index[None, :, None] < subtree_end[:, None])
  if window is not None:
    seen = seen & (positions[:, :, None] - positions[:, None] < window)
  grouped = q.reshape(rows, tokens, kv_heads, heads // kv_heads, head_dim)
  scores = scale * jnp.einsum('rikgd,rjkd->rkgij', grouped, k, preferred_element_type=jnp.float32)
  weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
  weights = jnp.where(seen[:, None, None], weights, 0).astype(v.dtype)
  out = jnp.einsum('rkgij,rjkd->rikgd', weights, v, preferred_element_type=jnp.float32)
  return out.reshape(q.shape).astype(q.dtype)


def _sharded(attend, mesh, q, k):
  """`attend` under shard_map: rows over data and fsdp, heads over tensor."""
  if mesh.shape['context'] != 1:
    raise ConfigError(
      f'tree attention does not split a row over the context axis, got config.mesh.context = '
      f'{mesh.shape["context"]}. Set config.mesh.context = 1; use fsdp or tensor instead.'
    )
  by_head = sharding.DEFAULT_RULES.spec_for(('rows', None, 'heads', None))
  by_row = sharding.DEFAULT_RULES.spec_for(('rows', None))
  for name, array in (('the queries (rows, tokens, heads, width)', q), ('the keys', k)):
    sharding.check_divisible(name, array.shape, by_head, mesh)
  return jax.shard_map(
    attend,
    mesh=mesh,
    in_specs=(by_head, by_head, by_head, by_row, by_row),
    out_specs=by_head,
    check_vma=False,  # loop carries start as constants, which vary over no axis
  )
