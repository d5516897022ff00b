"""Log-probability and entropy of target tokens straight from hidden states, one tile of logits at a time.

For: training and scoring, where [N, V] logits would be the largest array of the step. Rows of `hidden` are
taken in chunks; a chunk's [C, V] tile of logits lives only inside one turn of a loop, and the backward pass
computes it again. Not for: sampling, which needs the logits themselves.

Invariant: no array larger than a tile of [chunk_size, V] or the head's own gradient is ever formed, and a
masked row reads and writes nothing, whatever its hidden state holds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_TILE_ELEMENTS = 2**25  # 128 MiB of float32


class FusedLogProb(NamedTuple):
  """Per target, all float32 [N]; 0 where the mask is False."""

  log_prob: jax.Array  # log softmax(logits / temperature)[target]
  entropy: jax.Array  # of softmax(logits / temperature), in nats
  lse: jax.Array  # log sum exp(logits / temperature)


class _Rows(NamedTuple):
  """What belongs to each row, [N, ...] or chunked [S, C, ...]."""

  hidden: jax.Array  # [N, D]
  targets: jax.Array  # int32 [N]
  temperature: jax.Array  # float32 [N]


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
    chunk_size: rows per tile; None gives tiles of at most 128 MiB. Rows of a chunk are taken at a stride, so
      that rows split over devices stay split within each chunk.

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
  chunk = min(chunk_size or max(8, _TILE_ELEMENTS // vocab), count)
  steps = -(-count // chunk)
  chunk = -(-count // steps)  # as even as can be
  pad = steps * chunk - count
  rows = _Rows(
    jnp.pad(hidden, ((0, pad), (0, 0))),
    jnp.pad(targets, (0, pad)),
    jnp.pad(temperature, (0, pad), constant_values=1),
  )
  rows = jax.tree.map(lambda x: x.reshape(chunk, steps, *x.shape[1:]).swapaxes(0, 1), rows)
  out = _score(rows, head)
  out = FusedLogProb(*(x.swapaxes(0, 1).reshape(-1)[:count] for x in out))
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


def _logits(hidden, head, temperature):
  """float32 [C, V], divided by the temperature."""
  product = jnp.einsum('cd,vd->cv', hidden, head, preferred_element_type=jnp.float32)
  return product / temperature[:, None]


def _score_rows(rows, head):
  """One chunk: FusedLogProb of [C]."""
  logits = _logits(rows.hidden, head, rows.temperature)
  top = logits.max(-1)
  shifted = logits - top[:, None]
  total = jnp.exp(shifted).sum(-1)
  # Behind a barrier so that each sum computes its exponentials as it reads, rather than store them.
  again = lax.optimization_barrier(shifted)
  mean = (jnp.exp(again) * again).sum(-1) / total
  chosen = jnp.take_along_axis(logits, rows.targets[:, None], axis=-1)[:, 0]
  lse = top + jnp.log(total)
  return FusedLogProb(chosen - lse, jnp.log(total) - mean, lse)


@jax.custom_vjp
def _score(rows, head):
  cast = head.astype(rows.hidden.dtype)
  if rows.targets.shape[0] == 1:
    out = _score_rows(jax.tree.map(lambda x: x[0], rows), cast)
    return jax.tree.map(lambda x: x[None], out)
  return lax.map(lambda chunk: _score_rows(chunk, cast), rows)


def _score_fwd(rows, head):
  out = _score(rows, head)
  return out, (rows, head, out)


def _score_bwd(residuals, cotangents):
  rows, head, out = residuals
  cast = head.astype(rows.hidden.dtype)

  def visit(d_head, chunk):
    rows, out, cotangents = chunk
    d_hidden, d_head_here = _rows_gradient(rows, cast, out, cotangents)
    return d_head + d_head_here, d_hidden

  chunks = (rows, out, cotangents)
  if rows.targets.shape[0] == 1:
    d_hidden, d_head = _rows_gradient(
      *jax.tree.map(lambda x: x[0], (rows,)),
      cast,
      *(jax.tree.map(lambda x: x[0], x) for x in (out, cotangents)),
    )
    d_hidden = d_hidden[None]
  else:
    d_head, d_hidden = lax.scan(visit, jnp.zeros(head.shape, jnp.float32), chunks)
  return _Rows(d_hidden, None, None), d_head.astype(head.dtype)


def _rows_gradient(rows, head, out, cotangents):
  """One chunk: d hidden [C, D] in the dtype of hidden, d head float32 [V, D]."""
  logits = _logits(rows.hidden, head, rows.temperature)
  log_p = logits - out.lse[:, None]
  a, b, c = (x / rows.temperature for x in cotangents)
  d_logits = jnp.exp(log_p) * ((c - a - b * out.entropy)[:, None] - b[:, None] * log_p)
  vocab = lax.broadcasted_iota(jnp.int32, d_logits.shape, 1)
  d_logits = jnp.where(vocab == rows.targets[:, None], d_logits + a[:, None], d_logits)
  d_logits = d_logits.astype(rows.hidden.dtype)
  d_hidden = jnp.einsum('cv,vd->cd', d_logits, head, preferred_element_type=jnp.float32)
  d_head = jnp.einsum('cv,cd->vd', d_logits, rows.hidden, preferred_element_type=jnp.float32)
  return d_hidden.astype(rows.hidden.dtype), d_head


_score.defvjp(_score_fwd, _score_bwd)
