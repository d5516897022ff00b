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
from rlax_stack.learner.row_parts import in_parts, in_rows, target_states
from rlax_stack.models import decoder
from rlax_stack.models.adapter import AdapterSettings, abstract_weights, model_weights
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.experts import Routing
from rlax_stack.objectives.objective import Objective
from rlax_stack.objectives.router import RouterSums, router_sums
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
  adapter: what is trained beside frozen weights; None trains the model itself.
  """

  compute_dtype: Any = jnp.float32
  remat: str = 'none'
  temperature: float = 1.0
  kernels: str = 'auto'
  adapter: AdapterSettings | None = None


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
  attend, parts = _attend(config, rows, settings, mesh), _parts_of(rows, mesh)
  hidden = decoder.hidden_states(
    params,
    config,
    parts.tokens,
    parts.positions,
    attend,
    compute_dtype=settings.compute_dtype,
    remat=settings.remat,
    mesh=mesh,
    replay=_replay(parts),
  )
  return in_rows(hidden, mesh)


def row_states_and_router(
  params: Any,
  config: ModelConfig,
  rows: PackedBatch,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
) -> tuple[jax.Array, RouterSums]:
  """`row_states` of a mixture of experts, and the sums of its routers by `rows.place_weight`.

  Raises:
    ValueError: rows without `place_weight`.
  """
  if rows.place_weight is None:
    raise ValueError('the rows of a mixture need place_weight. Pack them with weigh_places=True.')
  attend, parts = _attend(config, rows, settings, mesh), _parts_of(rows, mesh)

  def sums_of(routing: Routing) -> RouterSums:
    replayed = parts.experts is not None
    return router_sums(routing.logits, routing.experts, parts.place_weight, replayed=replayed)

  hidden, (_, sums) = decoder.hidden_states_and_aux(
    params,
    config,
    parts.tokens,
    parts.positions,
    lambda q, k, v, **named: (attend(q, k, v, **named), None),
    compute_dtype=settings.compute_dtype,
    remat=settings.remat,
    mesh=mesh,
    replay=_replay(parts),
    observe=sums_of,
  )
  return in_rows(hidden, mesh), sums


def batch_load(
  params: Any,
  config: ModelConfig,
  batch: PackedBatch,
  num_micro: jax.Array,
  settings: ForwardSettings,
  mesh: Mesh | None = None,
) -> jax.Array:
  """Tokens that each expert of each layer gets of a whole batch [M, rows, ...], float32 [L, E]."""

  def body(index, total):
    rows = micro_batch(batch, index)
    return total + row_states_and_router(params, config, rows, settings, mesh)[1].load

  zeros = jnp.zeros((config.num_layers, config.num_experts), jnp.float32)
  return jax.lax.fori_loop(0, num_micro, body, zeros)


def _replay(rows: PackedBatch) -> jax.Array | None:
  """The experts of the rollout as the decoder takes them, [L, R, T, k]."""
  return None if rows.experts is None else jnp.moveaxis(rows.experts, 2, 0)


def _parts_of(rows: PackedBatch, mesh: Mesh | None) -> PackedBatch:
  """The rows with what the decoder reads of each token in parts."""
  names = ('tokens', 'positions', 'experts', 'place_weight')
  return rows._replace(**in_parts({name: getattr(rows, name) for name in names}, mesh))


def _attend(config, rows, settings, mesh):
  """Attention over the rows, of queries, keys and values in parts."""
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
  return lambda *qkv, **named: in_parts(attend(*in_rows(qkv, mesh), **named), mesh)


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
  sources = target_states(hidden, rows.source_index_t, mesh)
  given = (sources, rows.target_t, rows.mask_t, rows.proximal_vocabulary, rows.kept_ids_t)
  sources, target_t, mask_t, proximal, kept_ids_t = in_parts(given, mesh)
  head = decoder.lm_head(params, config)
  scored = fused_log_prob(
    sources.reshape(-1, sources.shape[-1]),
    head,
    target_t.reshape(-1),
    mask=mask_t.reshape(-1),
    temperature=settings.temperature,
    soft_cap=config.final_soft_cap,
    implementation=settings.kernels,
    mesh=mesh,
  )
  log_prob, entropy = (x.reshape(target_t.shape) for x in (scored.log_prob, scored.entropy))
  if terms is None and kept_ids_t is None:
    return in_rows(TargetScores(log_prob, entropy), mesh)
  found, kept_log_prob = vocabulary_terms(
    sources,
    head,
    target_t,
    with_kept_log_probs(terms),
    extras=(proximal, kept_ids_t),
    mask=mask_t,
    temperature=settings.temperature,
    soft_cap=config.final_soft_cap,
    mesh=mesh,
  )
  if kept_log_prob is not None:
    log_prob = jnp.where(jnp.any(kept_ids_t >= 0, axis=-1), kept_log_prob, log_prob)
  return in_rows(TargetScores(log_prob, entropy, found), mesh)


def rows_sharding(mesh: Mesh) -> NamedSharding:
  """Of arrays [M, rows, ...]: micro-batches stay whole, rows are split over the data axes."""
  return sharding_for(mesh, (None, 'rows'))


def weight_shapes(config: ModelConfig, settings: ForwardSettings) -> tuple[Any, tuple[Any, ...]]:
  """Shapes of what is trained, and of the frozen trees that programs take after their other arguments."""
  return abstract_weights(settings.adapter, config, decoder.abstract_params(config))


def _score_shardings(config: ModelConfig, mesh: Mesh, settings: ForwardSettings) -> tuple[Any, ...]:
  """Of (trained, batch, num_micro, *frozen)."""
  trained, frozen = param_shardings(weight_shapes(config, settings), mesh)
  return (trained, rows_sharding(mesh), NamedSharding(mesh, PartitionSpec()), *frozen)


@functools.lru_cache(maxsize=8)
def make_score(
  config: ModelConfig, mesh: Mesh, settings: ForwardSettings
) -> Callable[..., jax.Array]:
  """Scoring without gradients, compiled at its first call and shared by equal arguments.

  Args:
    config: shape of the model.
    mesh: where rows and parameters live.
    settings: see ForwardSettings.

  Returns: function (params, batch [M, rows, ...], num_micro int32 scalar) -> float32 [M, rows, N],
    0 where masked and in micro-batches from num_micro on. With an adapter `params` is the adapter, and the
    frozen weights are a fourth argument.
  """

  def score(params, batch, num_micro, *frozen):
    model = model_weights(settings.adapter, params, *frozen)
    return score_batch(model, config, batch, num_micro, settings, mesh).log_prob

  shardings = _score_shardings(config, mesh, settings)
  return jax.jit(score, in_shardings=shardings, out_shardings=rows_sharding(mesh))


@functools.lru_cache(maxsize=8)
def make_proximal_score(
  config: ModelConfig, mesh: Mesh, settings: ForwardSettings, objective: Objective
) -> Callable[..., PackedBatch]:
  """Scoring under the proximal policy, compiled at its first call and shared by equal arguments.

  Args:
    config: shape of the model.
    mesh: where rows and parameters live.
    settings: see ForwardSettings.
    objective: its boxes may ask for more of the distributions than the log-prob.

  Returns: function (params, batch [M, rows, ...], num_micro int32 scalar) -> the batch with its
    `proximal_log_probs_t` and `proximal_vocabulary`; with an adapter as that of `make_score`.
  """
  terms = proximal_terms(objective)

  def score(params, batch, num_micro, *frozen):
    bare = batch._replace(proximal_vocabulary={})
    model = model_weights(settings.adapter, params, *frozen)
    found = score_batch(model, config, bare, num_micro, settings, mesh, terms)
    return found.log_prob, found.vocabulary

  shardings = _score_shardings(config, mesh, settings)
  compiled = jax.jit(score, in_shardings=shardings, out_shardings=rows_sharding(mesh))

  def with_proximal(params, batch, num_micro, *frozen):
    log_probs, vocabulary = compiled(params, batch, num_micro, *frozen)
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
