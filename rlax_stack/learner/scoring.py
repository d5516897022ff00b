"""Log-probs of the targets of packed rows under given parameters: with gradient in the loss,
without here.

Not for sampling. Invariant: one function, `target_log_probs`, serves the loss, the proximal and the
anchor scores, so that equal weights give equal numbers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.learner.kept_sets import with_kept_log_probs
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.objective import Objective
from rlax_stack.objectives.vocabulary import TokenTerms, proximal_terms
from rlax_stack.pallas_kernels.fused_log_prob import fused_log_prob
from rlax_stack.pallas_kernels.tree_attention import AttentionShape, prepare_tree_attention
from rlax_stack.pallas_kernels.vocabulary_terms import vocabulary_terms
from rlax_stack.sharding import param_shardings, sharding_for
from rlax_stack.types import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSettings:
  """How the model is run over packed rows.

  compute_dtype: of activations and of the weights in matmuls (softmax and log-probs are float32
    always).
  remat: one of `models.remat.REMAT_POLICIES`. temperature: logits are divided by
  it, as they were when the tokens were sampled. kernels: form of the kernels, 'auto', 'pallas' or 'xla'.
  """

  compute_dtype: Any = jnp.float32
  remat: str = 'none'
  temperature: float = 1.0
  kernels: str = 'auto'


class TargetScores(NamedTuple):
  """Of the distribution that predicts each target."""

  log_prob: jax.Array  # float32, within the kept set where the rows have one
  entropy: jax.Array  # float32, over the whole vocabulary
  vocabulary: Mapping[str, Any] = {}  # [..., N, ...] arrays by slot, from the terms asked for


def target_log_probs(
  params: Any,
  config: ModelConfig,
  rows: PackedBatch,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
  terms: TokenTerms | None = None,
) -> TargetScores:
  """Log-prob and entropy at every triple of the rows, and terms of the whole distributions.

  Args:
    params: nested dict of the model.
    config: shape of the model.
    rows: [R, T] rows with [R, N] triples; only places and kept sets are read, never advantages or log-probs.
    settings: see ForwardSettings.
    mesh: where rows and parameters live.
    terms: from `objectives.vocabulary`; read `rows.proximal_vocabulary`, and distributions over the whole vocabulary.

  Returns: TargetScores of [R, N] arrays, 0 at masked triples.
  """
  hidden = row_states(params, config, rows, settings, mesh)
  return head_log_probs(params, config, hidden, rows, settings, mesh, terms)


def row_states(
  params: Any,
  config: ModelConfig,
  rows: PackedBatch,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
) -> jax.Array:
  """Final hidden states of packed rows, [R, T, D]; arguments as `target_log_probs`."""
  attend = prepare_tree_attention(
    rows.positions,
    rows.subtree_end,
    shape=AttentionShape(
      config.num_heads, config.num_kv_heads, config.head_dim, settings.compute_dtype
    ),
    window=config.sliding_window,
    mixed=bool(config.global_layers),
    scale=config.attention_scale,
    soft_cap=config.attention_soft_cap,
    implementation=settings.kernels,
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
  mesh: Mesh | None = None,
  terms: TokenTerms | None = None,
) -> TargetScores:
  """`target_log_probs` of hidden states that are there already (`row_states`)."""
  # Only the places that predict a target reach the LM head.
  sources = jnp.take_along_axis(hidden, rows.source_index_t[..., None], axis=1)
  head = decoder.lm_head(params, config)
  scored = fused_log_prob(
    sources.reshape(-1, sources.shape[-1]),
    head,
    rows.target_t.reshape(-1),
    mask=rows.mask_t.reshape(-1),
    temperature=settings.temperature,
    soft_cap=config.final_soft_cap,
    implementation=settings.kernels,
    mesh=mesh,
  )
  log_prob, entropy = (x.reshape(rows.target_t.shape) for x in (scored.log_prob, scored.entropy))
  if terms is None and rows.kept_ids_t is None:
    return TargetScores(log_prob, entropy)
  found, kept_log_prob = vocabulary_terms(
    sources,
    head,
    rows.target_t,
    with_kept_log_probs(terms),
    extras=(rows.proximal_vocabulary, rows.kept_ids_t),
    mask=rows.mask_t,
    temperature=settings.temperature,
    soft_cap=config.final_soft_cap,
    mesh=mesh,
  )
  if kept_log_prob is not None:
    log_prob = jnp.where(jnp.any(rows.kept_ids_t >= 0, axis=-1), kept_log_prob, log_prob)
  return TargetScores(log_prob, entropy, found)


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


@functools.lru_cache(maxsize=8)
def make_proximal_score(
  config: ModelConfig, mesh: Mesh, settings: ForwardSettings, objective: Objective
) -> Callable[[Any, PackedBatch, jax.Array], PackedBatch]:
  """Scoring under the proximal policy, compiled at its first call and shared by equal arguments.

  Args:
    config: shape of the model.
    mesh: where rows and parameters live.
    settings: see ForwardSettings.
    objective: its boxes may ask for more of the distributions than the log-prob.

  Returns: function (params, batch [M, rows, ...], num_micro int32 scalar) -> the batch with its
    `proximal_log_probs_t` and `proximal_vocabulary`.
  """
  terms = proximal_terms(objective)

  def score(params, batch, num_micro):
    bare = batch._replace(proximal_vocabulary={})
    found = score_batch(params, config, bare, num_micro, settings, mesh, terms)
    return found.log_prob, found.vocabulary

  rows, replicated = rows_sharding(mesh), NamedSharding(mesh, PartitionSpec())
  compiled = jax.jit(
    score,
    in_shardings=(param_shardings(decoder.abstract_params(config), mesh), rows, replicated),
    out_shardings=rows,
  )

  def with_proximal(params, batch, num_micro):
    log_probs, vocabulary = compiled(params, batch, num_micro)
    return batch._replace(proximal_log_probs_t=log_probs, proximal_vocabulary=vocabulary)

  return with_proximal


def score_batch(
  params: Any,
  config: ModelConfig,
  batch: PackedBatch,
  num_micro: jax.Array,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
  terms: TokenTerms | None = None,
) -> TargetScores:
  """`target_log_probs` of [M, rows, ...] rows, one micro-batch after another; see `make_score`.

  Returns: TargetScores of [M, rows, N] arrays, 0 where masked and from num_micro on.
  """

  def one(index):
    return target_log_probs(params, config, micro_batch(batch, index), settings, mesh, terms)

  def body(index, total):
    return jax.tree.map(lambda whole, part: whole.at[index].set(part), total, one(index))

  shapes, count = jax.eval_shape(one, jnp.int32(0)), batch.mask_t.shape[0]
  zeros = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)
  return jax.lax.fori_loop(0, num_micro, body, zeros)


def micro_batch(batch: Any, index: jax.Array) -> Any:
  """Micro-batch `index` of a batch of [M, rows, ...] arrays."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False), batch
  )
