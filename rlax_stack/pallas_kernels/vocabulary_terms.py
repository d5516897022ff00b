"""Functions of the whole distribution of a token, from hidden states, a few tokens at a time.

For: terms of a loss that need more of the softmax than one log-probability and the entropy (a
nucleus, the most likely tokens, another policy's support). A tile of logits [R, block, V] lives in
one turn of a loop and is computed again by the backward pass.
Not for: log-probability and entropy alone, which `fused_log_prob` gives without any such tile.

Invariant: the largest array is a tile, the head or its gradient, never logits of all tokens; a
masked token reads and writes nothing, whatever its hidden state holds.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlax_stack.sharding import row_shards, sharding_for

# (log_policy float32 [n, V], targets int32 [n], extras of [n, ...]) -> pytree of arrays [n, ...]
TokenFunction = Callable[[jax.Array, jax.Array, Any], Any]

_TILE_TOKENS = 64


def vocabulary_terms(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  function: TokenFunction,
  *,
  extras: Any = None,
  mask: jax.Array | None = None,
  temperature: float = 1.0,
  soft_cap: float | None = None,
  block: int | None = None,
  mesh: Mesh | None = None,
) -> Any:
  """`function` of log softmax(cap(hidden head^T) / temperature), cap(x) = soft_cap tanh(x / soft_cap) or x.

  The logits are a product in the dtype of `hidden`, accumulated in float32; everything after is float32.
  Differentiable in hidden and head wherever `function` is. What `function` holds by stop_gradient
  costs no backward pass.

  Args:
    hidden: [R, N, D], after the final norm.
    head: [V, D]; its gradient is summed in float32 if it is float32.
    targets: int32 [R, N].
    function: see TokenFunction; called on flat tiles of tokens.
    extras: pytree of [R, N, ...] arrays, cut with the tokens and given to `function`.
    mask: bool [R, N]; where False the results are 0 and no gradient flows, even if hidden is NaN.
    temperature: > 0, divides the logits before the softmax.
    soft_cap: > 0, of the logits before the temperature, as in Gemma 2; None for none.
    block: tokens of one row in a tile; None takes 64 tokens on each device.
    mesh: rows lie over data, fsdp and context, the vocabulary over tensor; None: on one device.

  Returns: what `function` returns, with [R, N, ...] in place of [n, ...].
  """
  rows, count, width = hidden.shape
  shards = 1
  if mesh is not None:
    shards = row_shards(mesh.shape, 'row_parts')
  if rows % shards:
    raise ValueError(
      f'the rows must divide over the mesh, got {rows} rows and {shards} shards. Pad the rows.'
    )
  if mask is not None:
    hidden = jnp.where(mask[..., None], hidden, 0)
    targets = jnp.where(mask, targets, 0)
  size = min(block or max(_TILE_TOKENS * shards // rows, 1), count)
  steps = -(-count // size)
  heads = _on_every_shard(head, shards, mesh)

  @jax.checkpoint
  def tile(heads, part):
    hidden, targets, extras = part
    split = hidden.reshape(shards, -1, width)
    logits = jnp.einsum(
      'snd,svd->snv', split, heads.astype(split.dtype), preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
      logits = soft_cap * jnp.tanh(logits / soft_cap)
    log_policy = jax.nn.log_softmax(logits / temperature, axis=-1)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (targets, extras))
    found = function(log_policy.reshape(-1, log_policy.shape[-1]), *flat)
    return jax.tree.map(lambda x: x.reshape(rows, size, *x.shape[1:]), found)

  cut = jax.tree.map(lambda x: _cut(x, steps, size), (hidden, targets, extras))
  found = jax.lax.map(lambda part: tile(heads, part), cut)
  found = jax.tree.map(lambda x: _joined(x, count), found)
  return found if mask is None else jax.tree.map(lambda x: _masked(x, mask), found)


def _on_every_shard(head: jax.Array, shards: int, mesh: Mesh | None) -> jax.Array:
  """The head once for every shard of rows, [shards, V, D].

  Each shard then sums a gradient of its own in the loop, and they are added once after it.
  """
  heads = jnp.broadcast_to(head[None], (shards, *head.shape))
  if mesh is None:
    return heads
  return jax.lax.with_sharding_constraint(heads, sharding_for(mesh, ('row_parts', 'vocab', None)))


def _cut(x: jax.Array, steps: int, size: int) -> jax.Array:
  """[R, N, ...] -> [steps, R, size, ...], padded at the end of each row."""
  pad = steps * size - x.shape[1]
  x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
  return jnp.moveaxis(x.reshape(x.shape[0], steps, size, *x.shape[2:]), 1, 0)


def _joined(x: jax.Array, count: int) -> jax.Array:
  """[steps, R, size, ...] -> [R, count, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :count]


def _masked(x: jax.Array, mask: jax.Array) -> jax.Array:
  return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
