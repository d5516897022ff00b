"""Whole rows of packed trees on one device: padding to blocks, block tables, and the tokens that no kernel need see.

Not for choosing a form or splitting rows over devices (`tree_attention`). Invariant: a token that sees only itself
and is seen by nobody else reads and writes nothing of another token, whatever its q, k and v hold.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlax_stack.pallas_kernels.block_tables import block_kinds


class Kernel(NamedTuple):
  """One form with all that is static about it."""

  spec: Any  # with scale, window and soft_cap
  block_q: int
  block_kv: int
  make_tables: Callable[..., Any]  # (spec, kinds) -> tables with leading axis R
  attend: Callable[..., jax.Array]
  ring: bool = False  # over `context` it takes the keys of one device and passes them on, not those of whole rows


class Layout(NamedTuple):
  """Rows as the kernel reads them, padded to whole blocks."""

  positions: jax.Array  # int32 [R, T']
  ends: jax.Array  # int32 [R, T'], 0 for tokens that are left out
  alone: jax.Array  # bool [R, T], of the queries at hand: answered without the kernel
  first_query: jax.Array  # int32 [1]
  tables: Any


def lay_out(kernel, positions, subtree_end, first_query=0, num_queries=None) -> Layout:
  """The tables of whole rows for the queries [first_query, first_query + num_queries)."""
  tokens = positions.shape[1]
  queries = tokens if num_queries is None else num_queries
  index = jnp.arange(tokens, dtype=jnp.int32)[None]
  ends = jnp.maximum(subtree_end, index + 1)
  reach = lax.cummax(ends, axis=1)
  seen_before = jnp.pad(reach[:, :-1], ((0, 0), (1, 0))) > index
  alone = ~seen_before & (ends == index + 1)
  ends = jnp.where(alone, 0, ends)  # the kernels leave such tokens out
  pad = ((0, 0), (0, -tokens % max(kernel.block_q, kernel.block_kv)))
  positions, ends = jnp.pad(positions, pad), jnp.pad(ends, pad)
  first = jnp.asarray(first_query, jnp.int32)
  kinds = None
  if kernel.attend is not dense:
    kinds = block_kinds(
      positions, ends, block_q=kernel.block_q, block_kv=kernel.block_kv, window=kernel.spec.window
    )
    blocks = -(-queries // kernel.block_q) if num_queries else kinds.shape[1]
    kinds = lax.dynamic_slice_in_dim(kinds, first // kernel.block_q, blocks, axis=1)
  alone = lax.dynamic_slice_in_dim(alone, first, queries, axis=1)
  return Layout(positions, ends, alone, first[None], kernel.make_tables(kernel.spec, kinds))


def attend_rows(kernel, layout, q, k, v, sinks):
  """Rows on one device: tokens alone in their tree are answered here, the rest by a kernel.

  q may hold a part of the tokens of k and v, or all three the same part of the row.
  """
  apart = layout.alone[:, :, None, None]
  queries, keys = q.shape[1], k.shape[1]
  first = layout.first_query[0]
  first_key = first if queries == keys else jnp.int32(0)
  alone_keys = lax.dynamic_slice_in_dim(layout.ends, first_key, keys, axis=1) == 0
  masked_k, masked_v = (jnp.where(alone_keys[:, :, None, None], 0, x) for x in (k, v))
  pad = ((0, 0), (0, -keys % max(kernel.block_q, kernel.block_kv)), (0, 0), (0, 0))
  q_pad = ((0, 0), (0, -queries % kernel.block_q), (0, 0), (0, 0))
  if queries == keys:
    q_pad = pad
  out = kernel.attend(
    kernel.spec,
    jnp.pad(jnp.where(apart, 0, q), q_pad),
    jnp.pad(masked_k, pad),
    jnp.pad(masked_v, pad),
    sinks,
    layout.positions,
    layout.ends,
    first,
    layout.tables,
  )[:, :queries]
  return jnp.where(apart, _own_value(kernel.spec, q, k, v, sinks, first - first_key), out)


def _own_value(spec, q, k, v, sinks, first):
  """What a token that sees only itself gets: its value, less what a sink takes."""
  group = q.shape[2] // k.shape[2]
  own_k, own_v = (
    jnp.repeat(lax.dynamic_slice_in_dim(x, first, q.shape[1], axis=1), group, axis=2)
    for x in (k, v)
  )
  if sinks is None:
    return own_v
  score = spec.scale * jnp.sum(q.astype(jnp.float32) * own_k.astype(jnp.float32), -1)
  if spec.soft_cap is not None:
    score = spec.soft_cap * jnp.tanh(score / spec.soft_cap)
  share = jax.nn.sigmoid(score - sinks.astype(jnp.float32)[None, None])[..., None]
  return (share * own_v.astype(jnp.float32)).astype(q.dtype)


def dense(spec, q, k, v, sinks, positions, subtree_end, first_query, tables):
  """`tree_attention_reference` behind the arguments of the kernels; for whole rows."""
  del first_query, tables
  return tree_attention_reference(
    q,
    k,
    v,
    positions,
    subtree_end,
    window=spec.window,
    scale=spec.scale,
    soft_cap=spec.soft_cap,
    sinks=sinks,
  )


def tree_attention_reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  positions: jax.Array,
  subtree_end: jax.Array,
  *,
  window: int | None,
  scale: float,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
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
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  scores = jnp.where(seen[:, None, None], scores, -1e30)
  if sinks is not None:
    sink = sinks.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1, 1)
    scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:4], 1))], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1)[..., :tokens]
  weights = jnp.where(seen[:, None, None], weights, 0).astype(v.dtype)
  out = jnp.einsum('rkgij,rjkd->rikgd', weights, v, preferred_element_type=jnp.float32)
  return out.reshape(q.shape).astype(q.dtype)
