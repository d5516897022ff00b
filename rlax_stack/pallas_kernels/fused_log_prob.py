"""Log-probability and entropy of target tokens straight from hidden states, one tile of logits at a time.

For: training and scoring, where [N, V] logits would be the largest array of the step. The vocabulary is taken
in chunks; a tile of logits [N, C] lives only inside one turn of a loop, stays in cache, and is computed again
by the backward pass. Each chunk owns its rows of the head, so the head's gradient is written once, not summed.
Not for: sampling, which needs the logits themselves.

Invariant: no array larger than a tile or the head is ever formed, and a masked row reads and writes nothing,
whatever its hidden state holds.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_CHUNK = 2048  # vocabulary entries per tile
_TILE_ELEMENTS = 2**24  # 64 MiB of float32
_ABSENT = -1e30  # logit of an entry that only pads the vocabulary


class FusedLogProb(NamedTuple):
  """Per target, all float32 [N]; 0 where the mask is False."""

  log_prob: jax.Array  # log softmax(logits / temperature)[target]
  entropy: jax.Array  # of softmax(logits / temperature), in nats
  lse: jax.Array  # log sum exp(logits / temperature)


class _Rows(NamedTuple):
  """What belongs to each row; as a gradient, None where there is none."""

  hidden: jax.Array  # [N, D]
  targets: Any  # int32 [N]
  temperature: Any  # float32 [N]


def fused_log_prob(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  *,
  mask: jax.Array | None = None,
  temperature: float | jax.Array = 1.0,
  chunk_size: int | None = None,
) -> FusedLogProb:
  """Scores targets under softmax(hidden head^T / temperature).

  The logits are a product in the dtype of `hidden`, accumulated in float32; everything after is float32. All
  three outputs are differentiable in hidden and head: with p the softmax, H the entropy and cotangents a, b, c
  of log_prob, entropy and lse, d logits = (a onehot + p (c - a - b (log p + H))) / temperature.

  Args:
    hidden: [N, D], after the final norm; float32 or bfloat16.
    head: [V, D]; tied embeddings as they are. Cast to the dtype of hidden for the product; its gradient is
      summed in float32.
    targets: int32 [N], in [0, V) where the mask is True.
    mask: bool [N]; where False the outputs are 0 and no gradient flows, even if hidden is NaN. None: all True.
    temperature: > 0, one number or float32 [N]; divides the logits before the softmax. No gradient.
    chunk_size: vocabulary entries per tile, at most; None chooses, with tiles of at most 64 MiB. A chunk takes
      its entries at a stride, so that a vocabulary split over devices stays split within each chunk. A
      vocabulary that does not divide is padded, at the cost of a copy of the head.

  Returns:
    FusedLogProb(log_prob, entropy, lse).

  Raises:
    ValueError: shapes or dtypes that do not fit, a temperature or chunk size that is not positive.
  """
  count, vocab = _check(hidden, head, targets, mask, temperature, chunk_size)
  if mask is not None:
    hidden = jnp.where(mask[:, None], hidden, 0)
    targets = jnp.where(mask, targets, 0)
  temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (count,))
  chunk = chunk_size or max(128, min(_CHUNK, _TILE_ELEMENTS // count))
  out = _score(_num_steps(vocab, chunk), _Rows(hidden, targets, temperature), head)
  if mask is not None:
    out = FusedLogProb(*(jnp.where(mask, x, 0) for x in out))
  return out


def _check(hidden, head, targets, mask, temperature, chunk_size):
  if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
    raise ValueError(
      f'hidden must be [N, D] and head [V, D], got {hidden.shape} and {head.shape}. '
      f'Flatten rows and tokens first.'
    )
  count = hidden.shape[0]
  if count == 0:
    raise ValueError('hidden has no rows. Score at least one target, masked if need be.')
  if targets.shape != (count,) or targets.dtype != jnp.int32:
    raise ValueError(f'targets must be int32 [{count}], got {targets.dtype} {targets.shape}.')
  if mask is not None and (mask.shape != (count,) or mask.dtype != jnp.bool_):
    raise ValueError(f'mask must be bool [{count}], got {mask.dtype} {mask.shape}.')
  if isinstance(temperature, int | float) and not temperature > 0:
    raise ValueError(
      f'temperature must be > 0, got {temperature=}. Greedy sampling has no density.'
    )
  if chunk_size is not None and chunk_size < 1:
    raise ValueError(f'chunk_size must be at least 1, got {chunk_size=}.')
  return count, head.shape[0]


def _num_steps(vocab, chunk):
  """Chunks to cut the vocabulary into: a divisor close by if there is one, so that nothing is padded."""
  least = -(-vocab // chunk)
  close = (steps for steps in range(least, 4 * least + 1) if vocab % steps == 0)
  return next(close, least)


def _strided(head, steps, dtype):
  """[V, D] -> [C, steps, D]: entry v sits at [v // steps, v % steps]; padded at the end."""
  pad = -head.shape[0] % steps
  if pad:
    head = jnp.pad(head, ((0, pad), (0, 0)))
  return head.astype(dtype).reshape(-1, steps, head.shape[1])


def _tile(step, rows, blocks, vocab):
  """One chunk: its rows of the head [C, D], logits float32 [N, C], and bool [N, C] of the targets."""
  size, steps, _ = blocks.shape
  block = lax.dynamic_index_in_dim(blocks, step, axis=1, keepdims=False)
  logits = jnp.einsum('nd,cd->nc', rows.hidden, block, preferred_element_type=jnp.float32)
  logits = logits / rows.temperature[:, None]
  entries = jnp.arange(size, dtype=jnp.int32) * steps + step
  if size * steps != vocab:
    logits = jnp.where((entries < vocab)[None], logits, _ABSENT)
  return block, logits, entries[None] == rows.targets[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(steps, rows, head):
  blocks = _strided(head, steps, rows.hidden.dtype)

  def visit(step, state):
    top, total, spread, chosen = state
    _, logits, hit = _tile(step, rows, blocks, head.shape[0])
    new_top = jnp.maximum(top, logits.max(-1))
    shifted = logits - new_top[:, None]
    weights = jnp.exp(shifted)
    shrink = jnp.exp(top - new_top)
    # `spread` is the sum of weight times shifted logit, so it moves with the maximum.
    spread = shrink * (spread + total * (top - new_top)) + (weights * shifted).sum(-1)
    total = shrink * total + weights.sum(-1)
    return new_top, total, spread, chosen + jnp.where(hit, logits, 0).sum(-1)

  zeros = jnp.zeros(rows.targets.shape, jnp.float32)
  start = (zeros + _ABSENT, zeros, zeros, zeros)
  top, total, spread, chosen = lax.fori_loop(0, steps, visit, start)
  lse = top + jnp.log(total)
  return FusedLogProb(chosen - lse, jnp.log(total) - spread / total, lse)


def _score_fwd(steps, rows, head):
  out = _score(steps, rows, head)
  return out, (rows, head, out)


def _score_bwd(steps, residuals, cotangents):
  rows, head, out = residuals
  blocks = _strided(head, steps, rows.hidden.dtype)
  a, b, c = (x / rows.temperature for x in cotangents)
  level = c - a - b * out.entropy

  def visit(step, state):
    d_hidden, d_blocks = state
    block, logits, hit = _tile(step, rows, blocks, head.shape[0])
    log_p = logits - out.lse[:, None]
    d_logits = jnp.exp(log_p) * (level[:, None] - b[:, None] * log_p)
    d_logits = jnp.where(hit, d_logits + a[:, None], d_logits).astype(rows.hidden.dtype)
    d_hidden += jnp.einsum('nc,cd->nd', d_logits, block, preferred_element_type=jnp.float32)
    d_block = jnp.einsum('nc,nd->cd', d_logits, rows.hidden, preferred_element_type=jnp.float32)
    return d_hidden, lax.dynamic_update_index_in_dim(d_blocks, d_block, step, axis=1)

  start = (jnp.zeros(rows.hidden.shape, jnp.float32), jnp.zeros(blocks.shape, jnp.float32))
  d_hidden, d_blocks = lax.fori_loop(0, steps, visit, start)
  d_head = d_blocks.reshape(-1, head.shape[1])[: head.shape[0]]
  return _Rows(d_hidden.astype(rows.hidden.dtype), None, None), d_head.astype(head.dtype)


_score.defvjp(_score_fwd, _score_bwd)
