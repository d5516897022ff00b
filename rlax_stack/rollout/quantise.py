"""Quantised rollouts: weights in serving form and KV tables, one byte a number.

Weights are quantised anew from every tree that an engine takes. KV is quantised when it is written, with a float32
scale per token and key head computed from that very token: there is no calibration that could grow old. Embeddings,
LM head, norms, biases, softmax and log-probs stay as they are. Not for the arithmetic of quantised kernels
(models/quantised.py).

Invariant: prefill and decode multiply by the same quantised weights, so log-probs are those of the policy that samples.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.models import decoder
from rlax_stack.models.quantised import quantise_kernel, quantise_lines
from rlax_stack.pallas_kernels.shared_prefix_decode import KVScales
from rlax_stack.rollout.serving import ServingParams, fuse_layers

KV_KINDS = {'int8': jnp.int8, 'fp8': jnp.float8_e4m3fn}

_quantise_kernel = jax.jit(quantise_kernel, static_argnames='kind')


def quantise_model(params: decoder.Params, kind: str, dtype: Any) -> decoder.Params:
  """The tree of models/decoder.py with quantised kernels in its layers and `dtype` everywhere else.

  `kind` is one of KERNEL_KINDS, as below.
  """

  def part(name: str, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    held = {key: jnp.asarray(x, dtype) for key, x in arrays.items() if key != 'kernel'}
    if not name.endswith('_proj'):
      return held
    return {**held, 'kernel': _quantise_kernel(arrays['kernel'], kind=kind)}

  layers = {name: part(name, arrays) for name, arrays in params['layers'].items()}
  rest = {name: arrays for name, arrays in params.items() if name != 'layers'}
  return {**jax.tree.map(lambda x: jnp.asarray(x, dtype), rest), 'layers': layers}


def quantise_params(params: ServingParams, kind: str) -> ServingParams:
  """A quantised copy of weights in serving form, which must not be quantised already."""
  dtype = params.model['embedder']['embedding'].dtype
  model = quantise_model(params.model, kind, dtype)
  kernels = fuse_layers(model['layers'], dtype) if params.kernels else ()
  return ServingParams(model, kernels, params.qkv_bias)


class QuantisedTable(NamedTuple):
  """Pages of keys or values ≈ values · scales."""

  values: jax.Array  # int8 or float8_e4m3fn [L, N, K, page_size, Dh]
  scales: jax.Array  # float32 [L, N, K, page_size]


KVTable = jax.Array | QuantisedTable


def empty_table(shape: tuple[int, ...], kind: str, dtype: Any) -> KVTable:
  """A table [L, N, K, page_size, Dh] of zeros: of `dtype` where `kind` is 'same', else of one of KV_KINDS."""
  if kind == 'same':
    return jnp.zeros(shape, dtype)
  return QuantisedTable(jnp.zeros(shape, KV_KINDS[kind]), jnp.zeros(shape[:-1], jnp.float32))


def write_table(table: KVTable, at: Any, new: jax.Array, *, unique_indices: bool) -> KVTable:
  """The table with keys or values [..., Dh] at an index of its axes but the last; places outside are dropped."""
  stored: Any = new
  if isinstance(table, QuantisedTable):
    values, scales = quantise_lines(new, table.values.dtype)
    stored = QuantisedTable(values, scales[..., 0])
  return jax.tree.map(
    lambda old, x: old.at[at].set(x, unique_indices=unique_indices, mode='drop'), table, stored
  )


def read_table(table: KVTable, at: Any, dtype: Any) -> jax.Array:
  """Keys or values [..., Dh] in `dtype` at an index of the table's axes but the last."""
  if not isinstance(table, QuantisedTable):
    return table[at]
  return (table.values[at].astype(jnp.float32) * table.scales[at][..., None]).astype(dtype)


def decode_scales(*tables: KVTable) -> KVScales | None:
  """Scales of prefix keys and values, suffix keys and values, as the decode kernel takes them."""
  scales = [table.scales for table in tables if isinstance(table, QuantisedTable)]
  return KVScales._make(scales) if scales else None


def table_values(table: KVTable) -> jax.Array:
  """What the table holds, [L, N, K, page_size, Dh], without its scales."""
  return table.values if isinstance(table, QuantisedTable) else table
