"""Log-probs of the targets of packed rows under given parameters: with gradient in the loss,
without here.

Not for sampling. Invariant: one function, `target_log_probs`, serves the loss, the proximal and the
anchor scores, so that equal weights give equal numbers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.pallas_kernels.fused_log_prob import FusedLogProb, fused_log_prob
from rlax_stack.pallas_kernels.tree_attention import tree_attention
from rlax_stack.sharding import param_shardings, sharding_for
from rlax_stack.types import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSettings:
  """How the model is run over packed rows.

  compute_dtype: of activations and of the weights in matmuls (softmax and log-probs are float32
    always).
  remat: 'none', 'layer' or 'dots', see `decoder.hidden_states`. temperature: logits are divided by
  it, as they were when the tokens were sampled.
  """

  compute_dtype: Any = jnp.float32
  remat: str = 'none'
  temperature: float = 1.0


def target_log_probs(
  params: Any,
  config: ModelConfig,
  rows: PackedBatch,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
) -> FusedLogProb:
  """Log-prob and entropy at every triple of the rows.

  Args:
    params: nested dict of the model.
    config: shape of the model.
    rows: [R, T] rows with [R, N] triples; only places are read, never advantages or log-probs.
    settings: see ForwardSettings.

  Returns: FusedLogProb of float32 [R, N] arrays; at masked triples they are finite and mean
    nothing.
  """
  return head_log_probs(
    params, config, row_states(params, config, rows, settings, mesh), rows, settings
  )


def row_states(
  params: Any,
  config: ModelConfig,
  rows: PackedBatch,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
) -> jax.Array:
  """Final hidden states of packed rows, [R, T, D]; arguments as `target_log_probs`."""
  attend = functools.partial(
    tree_attention,
    positions=rows.positions,
    subtree_end=rows.subtree_end,
    window=config.sliding_window,
    mesh=mesh,
  )
  return decoder.hidden_states(
    params,
    config,
    rows.tokens,
    rows.positions,
    attend,
    compute_dtype=settings.compute_dtype,
    remat=settings.remat,
  )


def head_log_probs(
  params: Any,
  config: ModelConfig,
  hidden: jax.Array,
  rows: PackedBatch,
  settings: ForwardSettings,
) -> FusedLogProb:
  """`target_log_probs` of hidden states that are there already (`row_states`)."""
  # Only the places that predict a target reach the LM head.
  sources = jnp.take_along_axis(hidden, rows.source_index_t[..., None], axis=1)
  scored = fused_log_prob(
    sources.reshape(-1, sources.shape[-1]),
    decoder.lm_head(params, config),
    rows.target_t.reshape(-1),
    mask=rows.mask_t.reshape(-1),
    temperature=settings.temperature,
  )
  return jax.tree.map(lambda x: x.reshape(rows.target_t.shape), scored)


def rows_sharding(mesh: Mesh) -> NamedSharding:
  """Of arrays [M, rows, ...]: micro-batches stay whole, rows are split over the data axes."""
  return sharding_for(mesh, (None, 'rows'))


@functools.lru_cache(maxsize=8)
def make_score(
  config: ModelConfig, mesh: Mesh, settings: ForwardSettings
) -> Callable[[Any, PackedBatch, jax.Array], jax.Array]:
  """Scoring without gradients, compiled at its first call and shared by equal arguments.

  Args:
    config: shape of the model.
    mesh: where rows and parameters live.
    settings: see ForwardSettings.

  Returns: function (params, batch [M, rows, ...], num_micro int32 scalar) -> float32 [M, rows, N],
    0 where masked
    and in micro-batches from num_micro on.
  """

  def score(params, batch, num_micro):
    return score_batch(params, config, batch, num_micro, settings, mesh).log_prob

  rows, replicated = rows_sharding(mesh), NamedSharding(mesh, PartitionSpec())
  return jax.jit(
    score,
    in_shardings=(param_shardings(decoder.abstract_params(config), mesh), rows, replicated),
    out_shardings=rows,
  )


def score_batch(
  params: Any,
  config: ModelConfig,
  batch: PackedBatch,
  num_micro: jax.Array,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
) -> FusedLogProb:
  """`target_log_probs` of [M, rows, ...] rows, one micro-batch after another; see `make_score`.

  Returns: FusedLogProb of float32 [M, rows, N], 0 where masked and from num_micro on.
  """

  def body(index, total):
    scored = target_log_probs(params, config, micro_batch(batch, index), settings, mesh)
    return jax.tree.map(lambda whole, part: whole.at[index].set(part), total, scored)

  zeros = jnp.zeros(batch.mask_t.shape, jnp.float32)
  return jax.lax.fori_loop(0, num_micro, body, FusedLogProb(zeros, zeros, zeros))


def micro_batch(batch: Any, index: jax.Array) -> Any:
  """Micro-batch `index` of a batch of [M, rows, ...] arrays."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False), batch
  )
