"""Log-probability and entropy of target tokens straight from hidden states, one tile of logits at a time.

For: training and scoring, where [N, V] logits would be the largest array of the step. The vocabulary is taken
in chunks; a tile of logits [N, C] lives only inside one turn of a loop, stays in cache, and is computed again
by the backward pass. Each chunk owns its rows of the head, so the head's gradient is written once, not summed.
Not for: sampling, which needs the logits themselves.

Invariant: no array larger than a tile or the head is ever formed, and a masked row reads and writes nothing,
whatever its hidden state holds.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from rlax_stack.pallas_kernels import dispatch, fused_log_prob_tpu
from rlax_stack.sharding import DEFAULT_RULES, sharding_for

_CHUNK = 2048  # vocabulary entries per tile
_TILE_ELEMENTS = 2**24  # of a device; 64 MiB of float32
_ABSENT = -1e30  # logit of an entry that only pads the vocabulary


class FusedLogProb(NamedTuple):
  """Per target, all float32 [N]; 0 where the mask is False."""

  log_prob: jax.Array  # log softmax(logits / temperature)[target]
  entropy: jax.Array  # of softmax(logits / temperature), in nats
  lse: jax.Array  # log sum exp(logits / temperature)
  top: 'TopLogProbs | None' = None  # where `top_k` asks for it


class TopLogProbs(NamedTuple):
  """The likeliest tokens, largest first; held constant, 0 where the mask is False."""

  log_prob: jax.Array  # float32 [N, k]
  token: jax.Array  # int32 [N, k]
  rank: jax.Array  # int32 [N], of the target: 1 and the number of tokens with a larger log-prob


class _Spec(NamedTuple):
  """What is static: hashable."""

  steps: int  # chunks of the vocabulary
  soft_cap: float | None
  tpu: fused_log_prob_tpu.TpuSpec | None  # None: plain XLA
  mesh: Mesh | None


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
  soft_cap: float | None = None,
  top_k: int = 0,
  chunk_size: int | None = None,
  implementation: str = 'auto',
  mesh: Mesh | None = None,
) -> FusedLogProb:
  """Scores targets under softmax(cap(hidden head^T) / temperature), cap(x) = soft_cap tanh(x / soft_cap) or x.

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
    soft_cap: of the logits before the temperature, as in Gemma 2; None for none.
    top_k: so many of the likeliest tokens are given too, and the target's rank, at the cost of another pass over the
      vocabulary.
    chunk_size: vocabulary entries per tile, at most; None chooses, with tiles of at most 64 MiB a device. A
      chunk takes
      its entries at a stride, so that a vocabulary split over devices stays split within each chunk. A
      vocabulary that does not divide is padded, at the cost of a copy of the head.
    implementation: 'auto', 'pallas' (TPU; the forward pass, the gradient is the XLA form's) or 'xla'; 'auto' is
      'pallas' on a TPU. A GPU has no other form than 'xla', and takes it where the other kernels take 'pallas'.
    mesh: targets lie over data, fsdp and context, the vocabulary over tensor. None: arrays are whole.

  Returns:
    FusedLogProb(log_prob, entropy, lse, top).

  Raises:
    ValueError: shapes or dtypes that do not fit, a temperature, cap or chunk size that is not positive, or an
      implementation that does not exist or is absent here.
  """
  count, vocab = _check(hidden, head, targets, mask, temperature, chunk_size)
  if soft_cap is not None and not soft_cap > 0:
    raise ValueError(f'soft_cap must be above 0 or None, got {soft_cap=}.')
  if not 0 <= top_k <= vocab:
    raise ValueError(f'top_k must be from 0 to the vocabulary of {vocab}, got {top_k=}.')
  if mask is not None:
    hidden = jnp.where(mask[:, None], hidden, 0)
    targets = jnp.where(mask, targets, 0)
  temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (count,))
  chunk = chunk_size or max(128, min(_CHUNK, _TILE_ELEMENTS * _shards(mesh) // count))
  spec = _Spec(_num_steps(vocab, chunk), soft_cap, _tpu_spec(implementation, mesh), mesh)
  rows = _Rows(hidden, targets, temperature)
  out = _score(spec, rows, head)
  if top_k:
    held = jax.lax.stop_gradient((rows, head, out))
    out = out._replace(top=_top(spec, top_k, *held))
  if mask is not None:
    out = jax.tree.map(lambda x: jnp.where(mask if x.ndim == 1 else mask[:, None], x, 0), out)
  return out


def _shards(mesh: Mesh | None) -> int:
  """Parts that targets are split into."""
  if mesh is None:
    return 1
  return math.prod(mesh.shape[axis] for axis in DEFAULT_RULES.mesh_axes('row_parts'))


def _tpu_spec(implementation: str, mesh: Mesh | None) -> fused_log_prob_tpu.TpuSpec | None:
  device, forms = dispatch.target_device(mesh), dispatch.WITHOUT_REFERENCE
  absent = dispatch.no_pallas(device)
  if absent and implementation == 'pallas' and dispatch.no_pallas(device, on_gpu=True) is None:
    return None  # one word chooses for all kernels of a run
  chosen = dispatch.choose('fused log-prob', implementation, absent=absent, forms=forms)
  if chosen == 'pallas':
    return fused_log_prob_tpu.TpuSpec()
  return None


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


class _Tile(NamedTuple):
  """One chunk of the vocabulary."""

  block: jax.Array  # [C, D], its rows of the head
  logits: jax.Array  # float32 [N, C], capped and divided by the temperature
  hit: jax.Array  # bool [N, C], the targets
  slope: jax.Array | None  # float32 [N, C], of the cap
  entries: jax.Array  # int32 [C], which tokens they are


def _tile(spec, step, rows, blocks, vocab):
  size, steps, _ = blocks.shape
  block = lax.dynamic_index_in_dim(blocks, step, axis=1, keepdims=False)
  logits = jnp.einsum('nd,cd->nc', rows.hidden, block, preferred_element_type=jnp.float32)
  slope = None
  if spec.soft_cap is not None:
    share = jnp.tanh(logits / spec.soft_cap)
    logits, slope = spec.soft_cap * share, 1.0 - share * share
  logits = logits / rows.temperature[:, None]
  entries = jnp.arange(size, dtype=jnp.int32) * steps + step
  if size * steps != vocab:
    logits = jnp.where((entries < vocab)[None], logits, _ABSENT)
  return _Tile(block, logits, entries[None] == rows.targets[:, None], slope, entries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(spec, rows, head):
  if spec.tpu is not None:
    state = fused_log_prob_tpu.softmax_state(
      spec.tpu,
      rows.hidden,
      rows.targets,
      rows.temperature,
      head.astype(rows.hidden.dtype),
      soft_cap=spec.soft_cap,
      mesh=spec.mesh,
    )
  else:
    state = _state(spec, rows, head)
  top, total, spread, chosen = state
  lse = top + jnp.log(total)
  return FusedLogProb(chosen - lse, jnp.log(total) - spread / total, lse)


def _state(spec, rows, head):
  """Maximum, sum of weights, sum of weight times shifted logit, and the target's logit; float32 [N] each."""
  blocks = _strided(head, spec.steps, rows.hidden.dtype)

  def visit(step, state):
    top, total, spread, chosen = state
    tile = _tile(spec, step, rows, blocks, head.shape[0])
    new_top = jnp.maximum(top, tile.logits.max(-1))
    shifted = tile.logits - new_top[:, None]
    weights = jnp.exp(shifted)
    shrink = jnp.exp(top - new_top)
    # `spread` is the sum of weight times shifted logit, so it moves with the maximum.
    spread = shrink * (spread + total * (top - new_top)) + (weights * shifted).sum(-1)
    total = shrink * total + weights.sum(-1)
    return new_top, total, spread, chosen + jnp.where(tile.hit, tile.logits, 0).sum(-1)

  zeros = jnp.zeros(rows.targets.shape, jnp.float32)
  start = (zeros + _ABSENT, zeros, zeros, zeros)
  return lax.fori_loop(0, spec.steps, visit, start)


def _top(spec, top_k, rows, head, out):
  """The `top_k` likeliest tokens: the best of those so far and of the next chunk, chunk by chunk."""
  blocks = _strided(head, spec.steps, rows.hidden.dtype)

  def visit(step, best):
    tile = _tile(spec, step, rows, blocks, head.shape[0])
    log_probs = tile.logits - out.lse[:, None]
    values = jnp.concatenate([best.log_prob, log_probs], axis=1)
    tokens = jnp.broadcast_to(tile.entries[None], log_probs.shape)
    tokens = jnp.concatenate([best.token, tokens], axis=1)
    values, places = lax.top_k(values, top_k)
    ahead = (log_probs > out.log_prob[:, None]) & ~tile.hit
    return TopLogProbs(
      values,
      jnp.take_along_axis(tokens, places, axis=1),
      best.rank + ahead.sum(-1, dtype=jnp.int32),
    )

  count = rows.hidden.shape[0]
  start = TopLogProbs(
    jnp.full((count, top_k), _ABSENT, jnp.float32),
    jnp.zeros((count, top_k), jnp.int32),
    jnp.ones((count,), jnp.int32),
  )
  return lax.fori_loop(0, spec.steps, visit, start)


def _score_fwd(spec, rows, head):
  out = _score(spec, rows, head)
  return out, (rows, head, out)


def _score_bwd(spec, residuals, cotangents):
  rows, head, out = residuals
  blocks = _strided(head, spec.steps, rows.hidden.dtype)
  a, b, c = (x / rows.temperature for x in cotangents[:3])
  level = c - a - b * out.entropy

  def visit(step, state):
    d_hidden, d_blocks = state
    tile = _tile(spec, step, rows, blocks, head.shape[0])
    log_p = tile.logits - out.lse[:, None]
    d_logits = jnp.exp(log_p) * (level[:, None] - b[:, None] * log_p)
    d_logits = jnp.where(tile.hit, d_logits + a[:, None], d_logits)
    if tile.slope is not None:
      d_logits = d_logits * tile.slope
    d_logits = d_logits.astype(rows.hidden.dtype)
    d_hidden += jnp.einsum('nc,cd->nd', d_logits, tile.block, preferred_element_type=jnp.float32)
    d_block = jnp.einsum('nc,nd->cd', d_logits, rows.hidden, preferred_element_type=jnp.float32)
    if spec.mesh is not None:  # each device sums its own part of the width
      d_block = lax.with_sharding_constraint(d_block, sharding_for(spec.mesh, ('vocab', 'embed')))
    return d_hidden, lax.dynamic_update_index_in_dim(d_blocks, d_block, step, axis=1)

  start = (jnp.zeros(rows.hidden.shape, jnp.float32), jnp.zeros(blocks.shape, jnp.float32))
  d_hidden, d_blocks = lax.fori_loop(0, spec.steps, visit, start)
  d_head = d_blocks.reshape(-1, head.shape[1])[: head.shape[0]]
  return _Rows(d_hidden.astype(rows.hidden.dtype), None, None), d_head.astype(head.dtype)


_score.defvjp(_score_fwd, _score_bwd)
