"""Tree attention in plain XLA, block by block: the CPU path and the baseline for kernels.

A loop with a dynamic trip count walks the list of block pairs that hold anything, so other suffixes, other
sequences, padding and the upper triangle cost nothing; no array of T x T elements exists, forwards or backwards.

The gradient is right by construction: one custom_vjp around the whole softmax, whose residuals are q, k, v, o
and the global log-sum-exp. With p = exp(s - lse) and delta = sum(do * o), ds = p (do v' - delta); partial
softmaxes are never differentiated, so no gradient of the lse is needed.

Over the mesh axis `context` every device holds a part of the queries and of the keys of each row. The parts of the keys
go round a ring, in the backward pass with the gradients that they gather; no device ever holds all keys of a row.

Softmax state and accumulators are float32; products run in the dtype of the inputs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlax_stack.pallas_kernels import block_tables
from rlax_stack.pallas_kernels.saved_names import named_attention

_HIDDEN = -1e30  # score of a hidden pair
_LOWEST = (
  -1e29
)  # start of the running maximum: above _HIDDEN, so a wholly hidden block adds nothing


class XlaSpec(NamedTuple):
  """What is static: hashable, so custom_vjp can take it as a non-differentiable argument."""

  scale: float
  window: int | None = None
  soft_cap: float | None = None
  block: int = 64  # tokens
  wide: int = 4  # so many key blocks are taken at once where a query block sees all of them
  parts: int = 1  # devices along `context` that the tokens of a row lie over


class XlaTables(NamedTuple):
  """The block pairs to visit."""

  wide: block_tables.BlockList  # key blocks of `wide` blocks
  narrow: block_tables.BlockList


class _Tree(NamedTuple):
  """The integers of the mask and the block pairs to visit."""

  positions: jax.Array  # int32 [R, T]
  subtree_end: jax.Array  # int32 [R, T]
  first_query: jax.Array  # int32 scalar
  first_key: jax.Array  # int32 scalar
  tables: XlaTables


def make_tables(spec: XlaSpec, kinds: jax.Array) -> XlaTables:
  """The lists of rows from the kinds of their blocks of `spec.block` queries and keys.

  Queries against the keys of one part of the row are in a list of their own: that of row r and part p is at
  r * parts + p.
  """
  rows, q_blocks, _ = kinds.shape
  by_part = kinds.reshape(rows, q_blocks, spec.parts, -1).swapaxes(1, 2)
  kinds = by_part.reshape(rows * spec.parts, q_blocks, -1)
  joined, left = block_tables.split_wide(kinds, spec.wide)
  return XlaTables(block_tables.block_list(joined), block_tables.block_list(left))


def attend(
  spec: XlaSpec,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  sinks: jax.Array | None,
  positions: jax.Array,
  subtree_end: jax.Array,
  first_query: jax.Array,
  tables: XlaTables,
) -> jax.Array:
  """Attention of rows of whole blocks; see `tree_attention`.

  Args:
    spec: see XlaSpec.
    q: [R, Q, H, Dh], any float dtype; Q and T divide by the block.
    k, v: [R, T, K, Dh], K divides H; with `spec.parts` above 1, under shard_map, the device's part of them alone.
    sinks: float32 [H] or None.
    positions, subtree_end: int32 [R, T]; a token with subtree_end[j] <= j is left out: it sees nobody and its
      output is 0.
    first_query: int32 scalar, the token that q begins with.
    tables: of `make_tables`.

  Returns:
    [R, Q, H, Dh] in the dtype of q.
  """
  rows, tokens, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  group = heads // kv_heads
  # The query heads that share a key head become rows of one matrix: [R, K, T * group, Dh].
  folded = q.reshape(rows, tokens, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
  folded = folded.reshape(rows, kv_heads, tokens * group, head_dim)
  tree = _Tree(positions, subtree_end, first_query, jnp.int32(0), tables)
  out = _attend(spec, group, folded, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), sinks, tree)
  out = out.reshape(rows, kv_heads, tokens, group, head_dim).transpose(0, 2, 1, 3, 4)
  return out.reshape(q.shape)


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
  q_first, kv_first = tree.first_query + q_first, tree.first_key + kv_first
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
  """Runs visit(state, row, first query, first key, number of keys) over both lists of every row."""
  for listed, keys in (
    (tree.tables.wide, spec.wide * spec.block),
    (tree.tables.narrow, spec.block),
  ):
    if not listed.capacity:
      continue  # rows shorter than a wide block

    def of_row(row, state, listed=listed, keys=keys):
      def step(i, state):
        pair = listed.packed[row, i]
        q_first = block_tables.q_block_of(pair) * spec.block
        return visit(state, row, q_first, block_tables.kv_block_of(pair) * keys, keys)

      return lax.fori_loop(0, listed.count[row], step, state)

    state = lax.fori_loop(0, listed.packed.shape[0], of_row, state)
  return state


def _over_parts(spec, tree, visit, keys, state, sums=()):
  """Runs visit(tree, keys, state, sums) -> (state, sums) with the keys of every part of the rows, beginning at home.

  keys: arrays [R, K, T / parts, Dh] of this device. sums: what is gathered for each part of the keys; they travel
  with them and come home.
  """
  if spec.parts == 1:
    return visit(tree, keys, state, sums)
  rows, _, length, _ = keys[0].shape
  own = tree.first_query // length
  ring = [(i, (i + 1) % spec.parts) for i in range(spec.parts)]

  def sent(arrays):
    return jax.tree.map(lambda x: lax.ppermute(x, 'context', ring), arrays)

  def against(hop, keys, state, sums):
    part = (own - hop) % spec.parts
    by_part = jax.tree.map(lambda x: x.reshape(rows, spec.parts, *x.shape[1:]), tree.tables)
    tables = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, part, 1, keepdims=False), by_part)
    here = tree._replace(first_key=part * length, tables=tables)
    return visit(here, keys, state, sums)

  def hop(number, carry):
    keys, state, sums = carry
    onward = sent(keys)  # needs nothing of the visit: the two may overlap
    state, sums = against(number, keys, state, sums)
    return onward, state, sent(sums)

  keys, state, sums = lax.fori_loop(0, spec.parts - 1, hop, (keys, state, sums))
  state, sums = against(spec.parts - 1, keys, state, sums)
  return state, sent(sums)


def _scores(spec, q, k):
  scores = spec.scale * _dot('kid,kjd->kij', q, k)
  return scores if spec.soft_cap is None else spec.soft_cap * jnp.tanh(scores / spec.soft_cap)


def _of_rows(sinks, q, group):
  """Sinks [H] as float32 [R, K, T * group], one per folded query row."""
  of_heads = sinks.astype(jnp.float32).reshape(1, q.shape[1], 1, group)
  shape = (*q.shape[:2], q.shape[2] // group, group)
  return jnp.broadcast_to(of_heads, shape).reshape(q.shape[:3])


def _forward(spec, group, q, k, v, sinks, tree):
  """Returns o in the dtype of q and lse, float32 [R, K, T * group]."""
  size = spec.block * group

  def against(tree, of_keys, state, sums):
    k, v = of_keys

    def visit(state, row, q_first, kv_first, keys):
      top, total, acc = state
      q_start = q_first * group
      scores = _scores(spec, _take(q, row, q_start, size), _take(k, row, kv_first, keys))
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

    return _over_pairs(spec, tree, visit, state), sums

  if sinks is None:
    top = jnp.full(q.shape[:3], _LOWEST, jnp.float32)
    total = jnp.zeros(q.shape[:3], jnp.float32)
  else:
    top, total = _of_rows(sinks, q, group), jnp.ones(q.shape[:3], jnp.float32)
  acc = jnp.zeros(q.shape, jnp.float32)
  (top, total, acc), _ = _over_parts(spec, tree, against, (k, v), (top, total, acc))
  total = jnp.where(total == 0, 1, total)  # a row that sees nobody gives 0
  return (acc / total[..., None]).astype(q.dtype), top + jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec, group, q, k, v, sinks, tree):
  return _forward(spec, group, q, k, v, sinks, tree)[0]


def _attend_fwd(spec, group, q, k, v, sinks, tree):
  out, lse = named_attention(*_forward(spec, group, q, k, v, sinks, tree))
  return out, (q, k, v, sinks, tree, out, lse)


def _attend_bwd(spec, group, residuals, d_out):
  q, k, v, sinks, tree, out, lse = residuals
  size = spec.block * group
  delta = _dot('rkid,rkid->rki', d_out, out)

  def against(tree, of_keys, dq, sums):
    k, v = of_keys

    def visit(state, row, q_first, kv_first, keys):
      dq, dk, dv = state
      q_start = q_first * group
      q_here, do_here = (_take(x, row, q_start, size) for x in (q, d_out))
      k_here, v_here = (_take(x, row, kv_first, keys) for x in (k, v))
      scores = _scores(spec, q_here, k_here)
      seen = _visible(tree, spec, row, q_first, kv_first, keys, group)
      weights = jnp.exp(scores - _take(lse, row, q_start, size)[..., None])
      weights = jnp.where(seen[None], weights, 0)
      d_weights = _dot('kid,kjd->kij', do_here, v_here)
      d_scores = weights * (d_weights - _take(delta, row, q_start, size)[..., None])
      if spec.soft_cap is not None:
        d_scores = d_scores * (1.0 - jnp.square(scores / spec.soft_cap))
      d_scores = (d_scores * spec.scale).astype(q.dtype)
      dq_here = _dot('kij,kjd->kid', d_scores, k_here)
      dk_here = _dot('kij,kid->kjd', d_scores, q_here)
      dv_here = _dot('kij,kid->kjd', weights.astype(v.dtype), do_here)
      return (
        _put(dq, _take(dq, row, q_start, size) + dq_here, row, q_start),
        _put(dk, _take(dk, row, kv_first, keys) + dk_here, row, kv_first),
        _put(dv, _take(dv, row, kv_first, keys) + dv_here, row, kv_first),
      )

    dq, *sums = _over_pairs(spec, tree, visit, (dq, *sums))
    return dq, tuple(sums)

  zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
  dq, (dk, dv) = _over_parts(spec, tree, against, (k, v), zeros[0], zeros[1:])
  d_sinks = None
  if sinks is not None:
    share = (jnp.exp(_of_rows(sinks, q, group) - lse) * delta).reshape(*q.shape[:2], -1, group)
    d_sinks = -share.sum((0, 2)).reshape(-1)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_sinks, None


_attend.defvjp(_attend_fwd, _attend_bwd)
