"""The forward pass of fused_log_prob as a Pallas kernel for TPU: tiles of logits that never leave VMEM.

The grid is (block of rows, block of the vocabulary, block of the width); a tile of logits is summed over the width in
float32 and then folded into the running softmax of its rows. A part of the vocabulary gives a state that can be joined
with those of the other parts.

Not for gradients: a backward kernel would compute every tile twice, once for the rows and once for the head, where the
XLA form computes it once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rlax_stack.pallas_kernels.tpu_blocks import LANES, column, dot

_ABSENT = -1e30  # logit of an entry past the vocabulary


class TpuSpec(NamedTuple):
  """Blocks of the kernel: rows, entries of the vocabulary, width; hashable.

  interpret: False, True, or pltpu.InterpretParams.
  """

  rows: int = 512
  entries: int = 512
  width: int = 2048
  interpret: Any = False


def softmax_state(
  spec: TpuSpec,
  hidden: jax.Array,
  targets: jax.Array,
  temperature: jax.Array,
  head: jax.Array,
  first: jax.Array | int = 0,
  *,
  soft_cap: float | None,
) -> tuple[jax.Array, ...]:
  """Maximum, sum of weights, sum of weight times shifted logit, and the target's logit; float32 [N] each.

  Args:
    spec: see TpuSpec.
    hidden: [N, D].
    targets: int32 [N]; those that are not of this head have a logit of 0.
    temperature: float32 [N].
    head: [V, D] in the dtype of hidden; the whole of it or a part.
    first: the token of its first entry.
    soft_cap: of the logits, or None.
  """
  count, width = hidden.shape
  vocab = head.shape[0]
  rows = min(spec.rows, -(-count // LANES) * LANES)
  blocks, entries = -(-count // rows), min(spec.entries, -(-vocab // LANES) * LANES)
  depth = _divisor(width, spec.width)
  pad = blocks * rows - count
  hidden = jnp.pad(hidden, ((0, pad), (0, 0)))
  targets = jnp.pad(targets - first, (0, pad)).reshape(blocks, 1, rows)
  inverse = jnp.pad(1.0 / temperature, (0, pad), constant_values=1.0).reshape(blocks, 1, rows)
  of_rows = pl.BlockSpec((1, 1, rows), lambda i, j, k: (i, 0, 0))
  out = jax.ShapeDtypeStruct((blocks, 1, rows), jnp.float32)
  column = pltpu.VMEM((rows, LANES), jnp.float32)
  state = pl.pallas_call(
    functools.partial(_kernel, vocab=vocab, soft_cap=soft_cap),
    out_shape=(out,) * 4,
    grid=(blocks, -(-vocab // entries), width // depth),
    in_specs=[
      pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
      pl.BlockSpec((entries, depth), lambda i, j, k: (j, k)),
      of_rows,
      of_rows,
    ],
    out_specs=[of_rows] * 4,
    scratch_shapes=[pltpu.VMEM((rows, entries), jnp.float32)] + [column] * 6,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * blocks * rows * vocab * width,
      transcendentals=blocks * rows * vocab,
      bytes_accessed=hidden.size * hidden.dtype.itemsize * -(-vocab // entries)
      + blocks * head.size * head.dtype.itemsize,
    ),
    interpret=spec.interpret,
    name='fused_log_prob',
  )(hidden, head, targets, inverse)
  return tuple(x.reshape(-1)[:count] for x in state)


def _divisor(width: int, most: int) -> int:
  """The largest multiple of the lanes that divides the width and is not above `most`; else the width."""
  fitting = [d for d in range(LANES, min(width, most) + 1, LANES) if width % d == 0]
  return fitting[-1] if fitting else width


def _kernel(hidden_ref, head_ref, target_ref, inverse_ref, *refs, vocab, soft_cap):
  outs, (logits_ref, *columns) = refs[:4], refs[4:]
  state, (target_column, inverse_column) = columns[:4], columns[4:]
  top_ref, total_ref, spread_ref, chosen_ref = state
  j, k = pl.program_id(1), pl.program_id(2)

  @pl.when((j == 0) & (k == 0))
  def _():
    top_ref[...] = jnp.full_like(top_ref, _ABSENT)
    for ref in (total_ref, spread_ref, chosen_ref):
      ref[...] = jnp.zeros_like(ref)
    # Targets as numbers that float32 holds exactly: no vocabulary has 2 ** 24 entries.
    target_column[...] = column(target_ref[0].astype(jnp.float32))
    inverse_column[...] = column(inverse_ref[0])

  product = dot(hidden_ref[...], head_ref[...], 1)

  @pl.when(k == 0)
  def _():
    logits_ref[...] = product

  @pl.when(k > 0)
  def _():
    logits_ref[...] += product

  @pl.when(k == pl.num_programs(2) - 1)
  def _():
    logits = logits_ref[...]
    if soft_cap is not None:
      logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = logits * inverse_column[:, :1]
    entry = j * logits.shape[1] + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    logits = jnp.where(entry < vocab, logits, _ABSENT)
    top = top_ref[...]
    new_top = jnp.maximum(top, logits.max(-1, keepdims=True))
    shifted = logits - new_top[:, :1]
    weights = jnp.exp(shifted)
    shrink = jnp.exp(top - new_top)
    moved = shrink * (spread_ref[...] + total_ref[...] * (top - new_top))
    spread_ref[...] = moved + (weights * shifted).sum(-1, keepdims=True)
    total_ref[...] = shrink * total_ref[...] + weights.sum(-1, keepdims=True)
    # A target of another part of the vocabulary may lie past the end of this one.
    hit = (entry.astype(jnp.float32) == target_column[:, :1]) & (entry < vocab)
    chosen_ref[...] += jnp.where(hit, logits, 0.0).sum(-1, keepdims=True)
    top_ref[...] = new_top

  @pl.when((k == pl.num_programs(2) - 1) & (j == pl.num_programs(1) - 1))
  def _():
    for out, ref in zip(outs, state, strict=True):
      out[0] = ref[...].T[:1]
