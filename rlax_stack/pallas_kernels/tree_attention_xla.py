"""Tree attention in plain XLA, block by block: the CPU path and the baseline for kernels.

A loop with a dynamic trip count walks the list of block pairs that hold anything, so other suffixes, other
sequences, padding and the upper triangle cost nothing; no array of T x T elements exists, forwards or backwards.

The gradient is right by construction: one custom_vjp around the whole softmax, whose residuals are q, k, v, o
and the global log-sum-exp. With p = exp(s - lse) and delta = sum(do * o), ds = p (do v' - delta); partial
softmaxes are never differentiated, so no gradient of the lse is needed.

Softmax state and accumulators are float32; products run in the dtype of the inputs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlax_stack.pallas_kernels import block_tables

_HIDDEN = -1e30  # score of a hidden pair
_LOWEST = (
  -1e29
)  # start of the running maximum: above _HIDDEN, so a wholly hidden block adds nothing


class _Spec(NamedTuple):
  """What is static: hashable, so custom_vjp can take it as a non-differentiable argument."""

  block: int
  wide: int
  window: int | None
  scale: float


class _Tree(NamedTuple):
  """The integers of the mask and the block pairs to visit."""

  positions: jax.Array  # int32 [R, T]
  subtree_end: jax.Array  # int32 [R, T]
  wide: block_tables.PairList  # key blocks of `wide` blocks
  narrow: block_tables.PairList


def tree_attention_xla(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  positions: jax.Array,
  subtree_end: jax.Array,
  *,
  window: int | None,
  scale: float,
  block: int = 64,
  wide: int = 4,
) -> jax.Array:
  """Token i attends to token j iff j <= i < subtree_end[j] and positions[i] - positions[j] < window.

  A token with `subtree_end[j] <= j` is left out: it sees nobody and its output is 0.

  Args:
    q: [R, T, H, Dh], any float dtype.
    k, v: [R, T, K, Dh], K divides H.
    positions, subtree_end: int32 [R, T].
    window: None for no limit.
    scale: multiplies the scores.
    block: tokens in a block; T is padded to a multiple of it.
    wide: so many key blocks are taken at once where a query block sees all of them.

  Returns:
    [R, T, H, Dh] in the dtype of q.
  """
  rows, tokens, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  group = heads // kv_heads
  pad = -tokens % block
  if pad:
    widths = ((0, 0), (0, pad), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, widths) for x in (q, k, v))
    positions, subtree_end = (jnp.pad(x, widths[:2]) for x in (positions, subtree_end))
  kinds = block_tables.block_kinds(
    positions, subtree_end, block_q=block, block_kv=block, window=window
  )
  joined, left = block_tables.split_wide(kinds, wide)
  tree = _Tree(positions, subtree_end, block_tables.pair_list(joined), block_tables.pair_list(left))
  # The query heads that share a key head become rows of one matrix: [R, K, T * group, Dh].
  padded = tokens + pad
  folded = q.reshape(rows, padded, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
  folded = folded.reshape(rows, kv_heads, padded * group, head_dim)
  out = _attend(
    _Spec(block, wide, window, scale),
    folded,
    k.transpose(0, 2, 1, 3),
    v.transpose(0, 2, 1, 3),
    tree,
  )
  out = out.reshape(rows, kv_heads, padded, group, head_dim).transpose(0, 2, 1, 3, 4)
  return out.reshape(rows, padded, heads, head_dim)[:, :tokens]


def _take(array, row, start, size):
  """[R, K, N, ...] -> [K, size, ...] from one row."""
  starts = (row, 0, start) + (0,) * (array.ndim - 3)
  return lax.dynamic_slice(array, starts, (1, array.shape[1], size, *array.shape[3:]))[0]


def _put(array, value, row, start):
  return lax.dynamic_update_slice(array, value[None], (row, 0, start) + (0,) * (array.ndim - 3))


def _dot(equation, left, right):
  return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _visible(tree, spec, row, q_first, kv_first, keys, group):
  """bool [block * group, keys]: which of the keys from kv_first on each folded query row sees."""
  q_index = q_first + jnp.arange(spec.block, dtype=jnp.int32)
  kv_index = kv_first + jnp.arange(keys, dtype=jnp.int32)

  def some(values, first, size):
    return lax.dynamic_slice(values, (row, first), (1, size))[0]

  ends = some(tree.subtree_end, kv_first, keys)
  seen = (kv_index[None] <= q_index[:, None]) & (q_index[:, None] < ends[None])
  if spec.window is not None:
    depth = some(tree.positions, q_first, spec.block)
    back = depth[:, None] - some(tree.positions, kv_first, keys)[None]
    seen = seen & (back < spec.window)
  return jnp.repeat(seen, group, axis=0)


def _over_pairs(spec, tree, visit, state):
  """Runs visit(state, row, first query, first key, number of keys) over both lists."""
  for pairs, keys in ((tree.wide, spec.wide * spec.block), (tree.narrow, spec.block)):
    if not pairs.row.size:
      continue  # a row shorter than a wide block

    def step(i, state, pairs=pairs, keys=keys):
      row, q_block, kv_block = (x[i] for x in pairs[:3])
      return visit(state, row, q_block * spec.block, kv_block * keys, keys)

    state = lax.fori_loop(0, pairs.count, step, state)
  return state


def _forward(spec, q, k, v, tree):
  """Returns o in the dtype of q and lse, float32 [R, K, T * group]."""
  group = q.shape[2] // k.shape[2]
  size = spec.block * group

  def visit(state, row, q_first, kv_first, keys):
    top, total, acc = state
    q_start = q_first * group
    scores = spec.scale * _dot(
      'kid,kjd->kij', _take(q, row, q_start, size), _take(k, row, kv_first, keys)
    )
    seen = _visible(tree, spec, row, q_first, kv_first, keys, group)
    scores = jnp.where(seen[None], scores, _HIDDEN)
    old_top = _take(top, row, q_start, size)
    new_top = jnp.maximum(old_top, scores.max(-1))
    weights = jnp.exp(scores - new_top[..., None])
    shrink = jnp.exp(old_top - new_top)
    values = _dot('kij,kjd->kid', weights.astype(v.dtype), _take(v, row, kv_first, keys))
    new_total = shrink * _take(total, row, q_start, size) + weights.sum(-1)
    new_acc = shrink[..., None] * _take(acc, row, q_start, size) + values
    return (
      _put(top, new_top, row, q_start),
      _put(total, new_total, row, q_start),
      _put(acc, new_acc, row, q_start),
    )

  top = jnp.full(q.shape[:3], _LOWEST, jnp.float32)
  total, acc = jnp.zeros(q.shape[:3], jnp.float32), jnp.zeros(q.shape, jnp.float32)
  top, total, acc = _over_pairs(spec, tree, visit, (top, total, acc))
  total = jnp.where(total == 0, 1, total)  # a row that sees nobody gives 0
  return (acc / total[..., None]).astype(q.dtype), top + jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec, q, k, v, tree):
  return _forward(spec, q, k, v, tree)[0]


def _attend_fwd(spec, q, k, v, tree):
  out, lse = _forward(spec, q, k, v, tree)
  return out, (q, k, v, tree, out, lse)


def _attend_bwd(spec, residuals, d_out):
  q, k, v, tree, out, lse = residuals
  group = q.shape[2] // k.shape[2]
  size = spec.block * group
  delta = _dot('rkid,rkid->rki', d_out, out)

  def visit(state, row, q_first, kv_first, keys):
    dq, dk, dv = state
    q_start = q_first * group
    q_here, do_here = (_take(x, row, q_start, size) for x in (q, d_out))
    k_here, v_here = (_take(x, row, kv_first, keys) for x in (k, v))
    scores = spec.scale * _dot('kid,kjd->kij', q_here, k_here)
    seen = _visible(tree, spec, row, q_first, kv_first, keys, group)
    weights = jnp.exp(scores - _take(lse, row, q_start, size)[..., None])
    weights = jnp.where(seen[None], weights, 0)
    d_weights = _dot('kid,kjd->kij', do_here, v_here)
    d_scores = weights * (d_weights - _take(delta, row, q_start, size)[..., None]) * spec.scale
    d_scores = d_scores.astype(q.dtype)
    dq_here = _dot('kij,kjd->kid', d_scores, k_here)
    dk_here = _dot('kij,kid->kjd', d_scores, q_here)
    dv_here = _dot('kij,kid->kjd', weights.astype(v.dtype), do_here)
    return (
      _put(dq, _take(dq, row, q_start, size) + dq_here, row, q_start),
      _put(dk, _take(dk, row, kv_first, keys) + dk_here, row, kv_first),
      _put(dv, _take(dv, row, kv_first, keys) + dv_here, row, kv_first),
    )

  zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
  dq, dk, dv = _over_pairs(spec, tree, visit, zeros)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_fwd, _attend_bwd)
