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
from jax.sharding import Mesh, PartitionSpec

from rlax_stack.pallas_kernels import dispatch, fused_log_prob_tpu
from rlax_stack.sharding import DEFAULT_RULES, row_shards

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

  chunk: int  # entries of the vocabulary in a tile
  soft_cap: float | None
  tpu: fused_log_prob_tpu.TpuSpec | None  # None: plain XLA
  mesh: Mesh | None
  head: tuple[str | None, str | None] = (None, None)  # mesh axes of the head's entries and width


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
    chunk_size: vocabulary entries per tile of a device; None chooses, with tiles of at most 64 MiB.
    implementation: 'auto', 'pallas' (TPU; the forward pass, the gradient is the XLA form's) or 'xla'; 'auto' is
      'pallas' on a TPU. A GPU has no other form than 'xla', and takes it where the other kernels take 'pallas'.
    mesh: targets lie over data, fsdp, expert and context, the vocabulary over tensor and the width of the head over
      fsdp: it is gathered in the dtype of hidden, and each tile of its gradient is summed and scattered at once. None:
      arrays are whole.

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
  tpu = _tpu_spec(implementation, mesh)
  mesh = None if mesh is None or mesh.size == 1 else mesh
  axes = (None, None) if mesh is None else _head_axes(mesh, *head.shape)
  parts = 1 if mesh is None or axes[0] is None else mesh.shape[axes[0]]
  chunk = chunk_size or _chunk(_TILE_ELEMENTS * _shards(mesh) // count)
  spec = _Spec(min(chunk, vocab // parts), soft_cap, tpu, mesh, axes)
  rows = _Rows(hidden, targets, temperature)
  out = _score(spec, rows, head)
  if top_k:
    held = jax.lax.stop_gradient((rows, head, out))
    out = out._replace(top=_everywhere(functools.partial(_top, top_k), spec, *held))
  if mask is not None:
    out = jax.tree.map(lambda x: jnp.where(mask if x.ndim == 1 else mask[:, None], x, 0), out)
  return out


def _head_axes(mesh: Mesh, vocab: int, width: int) -> tuple[str | None, str | None]:
  """Mesh axes that entries and width are split over; None where one does not divide, or has one device."""
  sides = zip(('vocab', 'embed'), (vocab, width), strict=True)
  (entries, features) = ((*DEFAULT_RULES.mesh_axes(name), size) for name, size in sides)
  found = [axis if size % mesh.shape[axis] == 0 else None for axis, size in (entries, features)]
  return found[0], found[1]


def _shards(mesh: Mesh | None) -> int:
  """Parts that targets are split into."""
  if mesh is None:
    return 1
  return row_shards(mesh.shape, 'row_parts')


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


def _chunk(most: int) -> int:
  """Entries of a tile: full lanes, so that sums over devices may be scattered on a TPU."""
  return max(128, min(_CHUNK, most) // 128 * 128)


class _Head(NamedTuple):
  """The part of the head that a device works on."""

  entries: jax.Array  # [V, D] in the dtype of hidden
  first: Any  # int32 scalar, the token of its first entry


def _everywhere(function, spec, rows, head, *rest, d_head=False):
  """`function(spec, rows, _Head, *rest)` on every device: its own rows by its part of the vocabulary.

  `rest` and what is returned lie as the rows do; with `d_head` it returns (of the rows, of the head) instead.
  """
  if spec.mesh is None:
    return function(spec, rows, _Head(head.astype(rows.hidden.dtype), jnp.int32(0)), *rest)

  entries, width = spec.head

  def part(rows, head, *rest):
    head, first = head.astype(rows.hidden.dtype), jnp.int32(0)
    if width is not None:
      head = lax.all_gather(head, width, axis=1, tiled=True)
    if entries is not None:
      first = lax.axis_index(entries).astype(jnp.int32) * head.shape[0]
    return function(spec, rows, _Head(head, first), *rest)

  of_rows, of_head = DEFAULT_RULES.spec_for(('row_parts',)), PartitionSpec(entries, width)
  return jax.shard_map(
    part,
    mesh=spec.mesh,
    in_specs=(of_rows, of_head, *(of_rows for _ in rest)),
    out_specs=(of_rows, of_head) if d_head else of_rows,
    check_vma=False,
  )(rows, head, *rest)


def _steps(spec, head) -> int:
  return -(-head.entries.shape[0] // spec.chunk)


class _Tile(NamedTuple):
  """One chunk of the vocabulary."""

  block: jax.Array  # [C, D], its rows of the head
  logits: jax.Array  # float32 [N, C], capped and divided by the temperature
  hit: jax.Array  # bool [N, C], the targets
  slope: jax.Array | None  # float32 [N, C], of the cap
  entries: jax.Array  # int32 [C], which tokens they are


def _tile(spec, step, rows, head):
  start = _start(spec, step, head)
  block = lax.dynamic_slice_in_dim(head.entries, start, spec.chunk)
  logits = jnp.einsum('nd,cd->nc', rows.hidden, block, preferred_element_type=jnp.float32)
  slope = None
  if spec.soft_cap is not None:
    share = jnp.tanh(logits / spec.soft_cap)
    logits, slope = spec.soft_cap * share, 1.0 - share * share
  logits = logits / rows.temperature[:, None]
  entries = start + jnp.arange(spec.chunk, dtype=jnp.int32)
  fresh = entries >= step * spec.chunk
  if head.entries.shape[0] % spec.chunk:
    logits = jnp.where(fresh[None], logits, _ABSENT)
  entries = entries + head.first
  hit = fresh[None] & (entries[None] == rows.targets[:, None])
  return _Tile(block, logits, hit, slope, entries)


def _start(spec, step, head):
  """Where a chunk begins: the last one reaches back where it would end past the end, and leaves that out."""
  return jnp.minimum(step * spec.chunk, head.entries.shape[0] - spec.chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(spec, rows, head):
  top, total, spread, chosen = _everywhere(_state, spec, rows, head)
  lse = top + jnp.log(total)
  return FusedLogProb(chosen - lse, jnp.log(total) - spread / total, lse)


def _state(spec, rows, head):
  """Maximum, sum of weights, sum of weight times shifted logit, and the target's logit; float32 [N] each."""
  if spec.tpu is not None:
    state = fused_log_prob_tpu.softmax_state(spec.tpu, *rows, *head, soft_cap=spec.soft_cap)
  else:
    state = _state_xla(spec, rows, head)
  return _joined(state) if _split_vocabulary(spec) else state


def _state_xla(spec, rows, head):
  def visit(step, state):
    top, total, spread, chosen = state
    tile = _tile(spec, step, rows, head)
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
  return lax.fori_loop(0, _steps(spec, head), visit, start)


def _split_vocabulary(spec) -> bool:
  entries = spec.head[0]
  return entries is not None and spec.mesh.shape[entries] > 1


def _joined(state):
  """The states of all parts of the vocabulary as one, on every device of `tensor`."""
  top, total, spread, chosen = state
  new_top = lax.pmax(top, 'tensor')
  shrink = jnp.exp(top - new_top)
  moved = shrink * (spread + total * (top - new_top))
  sums = lax.psum((shrink * total, moved, chosen), 'tensor')
  return new_top, *sums


def _top(top_k, spec, rows, head, out):
  """The `top_k` likeliest tokens: the best of those so far and of the next chunk, chunk by chunk."""

  def best_of(values, tokens):
    values, places = lax.top_k(values, top_k)
    return values, jnp.take_along_axis(tokens, places, axis=1)

  def visit(step, best):
    tile = _tile(spec, step, rows, head)
    log_probs = tile.logits - out.lse[:, None]
    values = jnp.concatenate([best.log_prob, log_probs], axis=1)
    tokens = jnp.broadcast_to(tile.entries[None], log_probs.shape)
    tokens = jnp.concatenate([best.token, tokens], axis=1)
    ahead = (log_probs > out.log_prob[:, None]) & ~tile.hit
    return TopLogProbs(*best_of(values, tokens), best.rank + ahead.sum(-1, dtype=jnp.int32))

  count = rows.hidden.shape[0]
  start = TopLogProbs(
    jnp.full((count, top_k), _ABSENT, jnp.float32),
    jnp.zeros((count, top_k), jnp.int32),
    jnp.zeros((count,), jnp.int32),
  )
  best = lax.fori_loop(0, _steps(spec, head), visit, start)
  if _split_vocabulary(spec):
    ahead = lax.psum(best.rank, 'tensor')
    held = (lax.all_gather(x, 'tensor', axis=1, tiled=True) for x in (best.log_prob, best.token))
    best = TopLogProbs(*best_of(*held), ahead)
  return best._replace(rank=best.rank + 1)


def _score_fwd(spec, rows, head):
  out = _score(spec, rows, head)
  return out, (rows, head, out)


def _score_bwd(spec, residuals, cotangents):
  rows, head, out = residuals
  scaled = tuple(x / rows.temperature for x in cotangents[:3])
  d_hidden, d_head = _everywhere(_gradient, spec, rows, head, out, scaled, d_head=True)
  return _Rows(d_hidden.astype(rows.hidden.dtype), None, None), d_head.astype(head.dtype)


def _gradient(spec, rows, head, out, scaled):
  """Float32 gradients of the rows and of the device's part of the head; `scaled` are those of the outputs."""
  a, b, c = scaled
  level = c - a - b * out.entropy

  def visit(turn, state):
    # From the end: what the last chunk leaves out is written by the one before it.
    step = steps - 1 - turn
    d_hidden, d_head = state
    tile = _tile(spec, step, rows, head)
    log_p = tile.logits - out.lse[:, None]
    d_logits = jnp.exp(log_p) * (level[:, None] - b[:, None] * log_p)
    d_logits = jnp.where(tile.hit, d_logits + a[:, None], d_logits)
    if tile.slope is not None:
      d_logits = d_logits * tile.slope
    d_logits = d_logits.astype(rows.hidden.dtype)
    d_hidden += jnp.einsum('nc,cd->nd', d_logits, tile.block, preferred_element_type=jnp.float32)
    d_block = jnp.einsum('nc,nd->cd', d_logits, rows.hidden, preferred_element_type=jnp.float32)
    if split is not None:
      d_block = lax.psum_scatter(d_block, split, scatter_dimension=1, tiled=True)
    start = _start(spec, step, head)
    return d_hidden, lax.dynamic_update_slice_in_dim(d_head, d_block, start, axis=0)

  split = spec.head[1]
  steps, (vocab, width) = _steps(spec, head), head.entries.shape
  if split is not None:
    width //= spec.mesh.shape[split]
  start = (jnp.zeros(rows.hidden.shape, jnp.float32), jnp.zeros((vocab, width), jnp.float32))
  d_hidden, d_head = lax.fori_loop(0, steps, visit, start)
  if spec.mesh is not None:
    others = [axis for axis in DEFAULT_RULES.mesh_axes('row_parts') if axis != split]
    d_head = lax.psum(d_head, others)
  if _split_vocabulary(spec):
    d_hidden = lax.psum(d_hidden, spec.head[0])
  return d_hidden, d_head


_score.defvjp(_score_fwd, _score_bwd)
