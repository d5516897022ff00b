"""The decode engine: prefill, insert, generate over static slots, with a shared prefix table.

Shaped like JetStream's engine interface (its method and argument names), with what RL adds: prefixes stored once and
referenced by rows, per-row sampling and identity keys, processed and raw log-probs and the weights version per token,
several steps per host round trip. Parameters are an argument of every call. The state is donated: use the returned one.
Who runs when is the scheduler's business (scheduler.py), not the engine's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.errors import ConfigError
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.pallas_kernels.decode_work import WorkList
from rlax_stack.pallas_kernels.shared_prefix_decode import shared_prefix_decode
from rlax_stack.rollout import attention_scores, prompt_scoring, quantise, serving, speculation
from rlax_stack.rollout import prefill as prefill_lib
from rlax_stack.rollout.engine_state import (
  DecodeState,
  EngineConfig,
  NewRows,
  Prefix,
  ResultTokens,
  RowState,
  empty_result,
  empty_state,
)
from rlax_stack.rollout.row_steps import accept, draw, goes_on, likeliest, start_rows
from rlax_stack.rollout.serving import ServingParams
from rlax_stack.rollout.step_inputs import step_inputs


def _logits(
  config: ModelConfig,
  engine: EngineConfig,
  params: ServingParams,
  state: DecodeState,
  work: WorkList,
  suffix_pages: jax.Array,
) -> tuple[jax.Array, quantise.KVTable, quantise.KVTable, jax.Array | None]:
  """Logits [V, M] after each row's newest token, the suffix KV with that token in it, and its experts [M, L, k]."""
  rows = state.rows
  suffix_k, suffix_v = state.suffix_k, state.suffix_v
  size = engine.suffix_page_size
  index = jnp.clip(rows.count - 1, 0, engine.pages_per_sample * size - 1)
  page = jnp.take_along_axis(suffix_pages, (index // size)[:, None], axis=1)[:, 0]
  # A row that does not decode may have no page, and must not write into another row's.
  outside = engine.suffix_pages + jnp.arange(engine.slots, dtype=jnp.int32)
  page, place = jnp.where(rows.active, page, outside), index % size
  # One line of a key head at a time: a TPU would lay the table out anew, copying it, to write all heads at once.
  heads = jnp.arange(config.num_kv_heads, dtype=jnp.int32)
  of_layer = step_inputs(config, engine, rows, work, suffix_pages)
  x = decoder.embed(params.model, config, rows.token, engine.compute_dtype).T

  def run_layer(layer: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    x, suffix_k, suffix_v, experts = carry
    plan, sin, cos = of_layer(layer)
    q, k, v = serving.project_qkv(params, config, layer, x, sin, cos)
    at = (layer, page[:, None], heads[None], place[:, None])
    suffix_k = quantise.write_table(suffix_k, at, k, unique_indices=True)
    suffix_v = quantise.write_table(suffix_v, at, v, unique_indices=True)
    tables = (state.prefix_k, state.prefix_v, suffix_k, suffix_v)
    prefix_keys, prefix_values, keys, values = map(quantise.table_values, tables)
    attended = shared_prefix_decode(
      q,
      prefix_keys,
      prefix_values,
      keys,
      values,
      plan,
      layer=layer,
      scale=config.attention_scale,
      soft_cap=config.attention_soft_cap,
      kv_scales=quantise.decode_scales(*tables),
    )
    x, chosen = serving.finish_layer(params, config, layer, x, attended)
    if experts is not None and chosen is not None:
      experts = experts.at[:, layer].set(chosen.astype(jnp.int16))
    return x, suffix_k, suffix_v, experts

  experts = None
  if engine.record_experts:
    shape = (engine.slots, config.num_layers, config.experts_per_token)
    experts = jnp.zeros(shape, jnp.int16)
  carry = (x, suffix_k, suffix_v, experts)
  x, suffix_k, suffix_v, experts = jax.lax.fori_loop(0, config.num_layers, run_layer, carry)
  return serving.logits_of(params, config, x), suffix_k, suffix_v, experts


def _generate(
  config: ModelConfig,
  engine: EngineConfig,
  params: ServingParams,
  state: DecodeState,
  work: WorkList,
  suffix_pages: jax.Array,
  forced: jax.Array,
  version: jax.Array,
  steps: jax.Array,
  stop_after: jax.Array,
) -> tuple[DecodeState, ResultTokens]:
  shape = (engine.chunk_steps, engine.slots)
  result = empty_result(config, engine, shape, state.rows.finish, version)
  before = jnp.sum(state.rows.active)

  def going(carry: tuple[RowState, Any, Any, ResultTokens]) -> jax.Array:
    rows, _, _, result = carry
    return goes_on(rows, result, before, steps, stop_after)

  def step(
    carry: tuple[RowState, Any, Any, ResultTokens],
  ) -> tuple[RowState, Any, Any, ResultTokens]:
    rows, suffix_k, suffix_v, result = carry
    current = state._replace(rows=rows, suffix_k=suffix_k, suffix_v=suffix_v)
    forward = _logits(config, engine, params, current, work, suffix_pages)
    logits, suffix_k, suffix_v, experts = forward
    i = result.steps
    drawn, token = draw(logits, rows, rows.position + 1, forced[i], engine.kept_tokens)
    who = rows.active
    rows = accept(rows, token, who)
    ids, values = likeliest(engine, logits, rows)
    if result.top_ids is not None and result.top_log_probs is not None:
      result = result._replace(
        top_ids=result.top_ids.at[i].set(ids), top_log_probs=result.top_log_probs.at[i].set(values)
      )
    if result.kept_ids is not None and drawn.kept_ids is not None:
      result = result._replace(kept_ids=result.kept_ids.at[i].set(drawn.kept_ids))
    if result.experts is not None and experts is not None:
      result = result._replace(experts=result.experts.at[i].set(experts))
    result = result._replace(
      tokens=result.tokens.at[i].set(token),
      log_probs=result.log_probs.at[i].set(drawn.log_prob),
      raw_log_probs=result.raw_log_probs.at[i].set(drawn.raw_log_prob),
      valid=result.valid.at[i].set(who),
      finish=rows.finish,
      steps=i + 1,
    )
    return rows, suffix_k, suffix_v, result

  carry = (state.rows, state.suffix_k, state.suffix_v, result)
  rows, suffix_k, suffix_v, result = jax.lax.while_loop(going, step, carry)
  return state._replace(rows=rows, suffix_k=suffix_k, suffix_v=suffix_v), result


def _store_prefix(
  engine: EngineConfig, prefix: Prefix, state: DecodeState, pages: jax.Array, entries: jax.Array
) -> DecodeState:
  layers, batch, length, kv, dim = prefix.k.shape
  split = (layers, batch * (length // engine.page_size), engine.page_size, kv, dim)

  def store(table: quantise.KVTable, new: jax.Array) -> quantise.KVTable:
    at = (slice(None), pages.reshape(-1))
    new = new.reshape(split).transpose(0, 1, 3, 2, 4)
    return quantise.write_table(table, at, new, unique_indices=False)

  return state._replace(
    prefix_k=store(state.prefix_k, prefix.k),
    prefix_v=store(state.prefix_v, prefix.v),
    prefix_logits=state.prefix_logits.at[entries].set(prefix.logits, mode='drop'),
  )


def check_mixture(config: ModelConfig, engine: EngineConfig) -> None:
  """Raises ConfigError where a mixture's weights are to be quantised, or a dense model's experts recorded."""
  if engine.record_experts and not config.num_experts:
    raise ConfigError(
      'config.rollout.router_replay=True replays the experts of a mixture, and this model is dense. Set it to False.'
    )
  for name, off in (('weights', 'same'), ('draft_weights', 'none')):
    value = getattr(engine, name)
    if config.num_experts and value != off:
      raise ConfigError(
        f'config.rollout.{name}={value} does not know experts, of which this model has {config.num_experts}. Set it to '
        f'{off}; config.rollout.kv may stay quantised.'
      )


class Engine:
  """Compiled programs of one model and one set of static sizes; holds neither weights nor state."""

  def __init__(
    self, config: ModelConfig, engine_config: EngineConfig, *, join_kernels: bool | None = None
  ):
    """Makes the programs; each is compiled when it is first called.

    Args:
      config: shape of the model.
      engine_config: static sizes.
      join_kernels: whether decode has joined kernels of its own beside the model's tree: quicker on a CPU, twice the
        memory. None: on a CPU alone.
    """
    check_mixture(config, engine_config)
    self.config = config
    self.engine_config = engine_config
    self._device = jax.local_devices()[0]
    self._joins = self._device.platform == 'cpu' if join_kernels is None else join_kernels
    self._prefill = jax.jit(functools.partial(prefill_lib.prefill, config, engine_config))
    scores = functools.partial(prompt_scoring.score, config, engine_config)
    self._score = jax.jit(scores, static_argnames='tops')
    received = functools.partial(attention_scores.attention_received, config, engine_config)
    self._attention_received = jax.jit(received)
    self._store = jax.jit(functools.partial(_store_prefix, engine_config), donate_argnums=1)
    self._prefill_more = jax.jit(functools.partial(prefill_lib.prefill_more, config, engine_config))
    self._start = jax.jit(functools.partial(start_rows, engine_config), donate_argnums=1)
    self._generate = jax.jit(functools.partial(_generate, config, engine_config), donate_argnums=1)
    forward = functools.partial(_logits, config, engine_config)
    self._speculate = jax.jit(
      functools.partial(speculation.speculate, forward, config, engine_config), donate_argnums=1
    )
    self._release = jax.jit(lambda active, slot: active.at[slot].set(False), donate_argnums=0)

  @property
  def max_concurrent_decodes(self) -> int:
    """Rows decoded together."""
    return self.engine_config.slots

  @property
  def max_prefill_length(self) -> int:
    """Longest prompt in tokens."""
    return self.engine_config.max_prompt_tokens

  def load_params(self, params: decoder.Params) -> ServingParams:
    """Serving form of a parameter tree (models/decoder.py) in the compute dtype, quantised where that is asked for."""
    dtype, kind = self.engine_config.compute_dtype, self.engine_config.weights
    # The learner may shard its weights over devices; an engine decodes on one.
    params = jax.device_put(params, self._device)
    if kind == 'same':
      model = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    else:
      model = quantise.quantise_model(params, kind, dtype)
    has_bias = self.config.attention_bias
    bias = serving.fuse_bias(params['layers'], dtype) if has_bias else None
    kernels = serving.fuse_layers(model['layers'], dtype) if self._joins else ()
    made = ServingParams(model, kernels, bias)
    if self.engine_config.draft_weights == 'none':
      return made
    return made._replace(draft=quantise.quantise_params(made, self.engine_config.draft_weights))

  def init_decode_state(self) -> DecodeState:
    """Empty tables and idle slots."""
    return jax.device_put(empty_state(self.config, self.engine_config), self._device)

  def prefill(
    self, *, params: ServingParams, padded_tokens: np.ndarray, true_length: np.ndarray
  ) -> Prefix:
    """Prompts int32 [B, P], padded at the end, of true_length int32 [B] tokens; compiled once per (B, P)."""
    return self._prefill(params, padded_tokens, true_length)

  def prefill_more(
    self,
    params: ServingParams,
    decode_state: DecodeState,
    padded_tokens: np.ndarray,
    true_length: np.ndarray,
    pages: np.ndarray,
    context: np.ndarray,
  ) -> Prefix:
    """The next piece of prefixes whose earlier pieces are stored; compiled once per (B, C).

    Args:
      params: of the model.
      decode_state: read, not donated.
      padded_tokens: int32 [B, C], padded at the end.
      true_length: int32 [B], tokens of the piece.
      pages: int32 [B, pages_per_prefix], of the pieces before, whole pages in order.
      context: int32 [B], tokens before the piece, a multiple of page_size.
    """
    tables = (decode_state.prefix_k, decode_state.prefix_v)
    return self._prefill_more(params, *tables, padded_tokens, true_length, pages, context)

  def score(
    self,
    params: ServingParams,
    padded_tokens: np.ndarray,
    true_length: np.ndarray,
    *,
    tops: bool = False,
  ) -> prompt_scoring.Scores:
    """Log-probs of every token of whole texts; compiled once per (B, P), with and without `tops`.

    Args:
      params: of the model.
      padded_tokens: int32 [B, P], padded at the end.
      true_length: int32 [B].
      tops: whether the max_top_log_probs likeliest tokens and ranks come back too.
    """
    return self._score(params, padded_tokens, true_length, tops=tops)

  def attention_received(
    self, params: ServingParams, padded_tokens: np.ndarray, true_length: np.ndarray, distance: int
  ) -> jax.Array:
    """Attention that tokens get from those `distance` or more after them, float32 [B, P]; see attention_scores.py."""
    return self._attention_received(params, padded_tokens, true_length, np.int32(distance))

  def insert(
    self, prefix: Prefix, decode_state: DecodeState, pages: np.ndarray, entries: np.ndarray
  ) -> DecodeState:
    """Stores prefilled prompts in the prefix table, once each; rows refer to them.

    Args:
      prefix: of B prompts padded to P tokens.
      decode_state: donated.
      pages: int32 [B, P / page_size], where each page goes; `prefix_pages` (out of range) drops a page.
      entries: int32 [B], where the last logits go; `slots` (out of range) drops them.
    """
    return self._store(prefix, decode_state, pages, entries)

  def bulk_insert(
    self, decode_state: DecodeState, new: NewRows, version: int
  ) -> tuple[DecodeState, ResultTokens]:
    """Starts rows on stored prefixes and samples their first tokens (N = 1)."""
    rows, result = self._start(
      decode_state.prefix_logits, decode_state.rows, new, np.int32(version)
    )
    return decode_state._replace(rows=rows), result

  def generate(
    self,
    params: ServingParams,
    decode_state: DecodeState,
    work: WorkList,
    suffix_pages: np.ndarray,
    forced: np.ndarray,
    *,
    version: int,
    steps: int,
    stop_after: int = 0,
  ) -> tuple[DecodeState, ResultTokens]:
    """Up to `steps` (at most chunk_steps) decode steps in one call.

    Ends early when no row is active, or with `stop_after` > 0 once that many rows have finished in this call.

    Args:
      params: of the model.
      decode_state: donated.
      work: what rows read of the prefix table.
      suffix_pages: int32 [M, pages_per_sample], where rows keep their own tokens; a running row must have pages for all
        that it has and samples in this call.
      forced: int32 [chunk_steps, M], tokens that rows take whatever they sample, -1 where they sample freely.
      version: of the weights.
      steps: at most.
      stop_after: see above.
    """
    scalars = (np.int32(version), np.int32(steps), np.int32(stop_after))
    return self._generate(params, decode_state, work, suffix_pages, forced, *scalars)

  def speculate(
    self,
    params: ServingParams,
    decode_state: DecodeState,
    work: WorkList,
    suffix_pages: np.ndarray,
    columns: speculation.Columns,
    proposals: speculation.Proposals,
    *,
    version: int,
    steps: int,
    stop_after: int = 0,
    depth: int = 0,
  ) -> tuple[DecodeState, ResultTokens]:
    """As `generate`, with idle columns that check proposed tokens: up to max_draft + 1 tokens per row and step.

    `work` lists what columns read, `suffix_pages` what rows have. The result holds chunk_steps * (max_draft + 1)
    entries per row, in the order of its tokens. With draft_weights, the quantised copy proposes the next `depth` tokens
    of every row where `proposals` has none.
    """
    scalars = (np.int32(version), np.int32(steps), np.int32(stop_after), np.int32(depth))
    return self._speculate(params, decode_state, work, suffix_pages, columns, proposals, *scalars)

  def free_resource(self, slot: int, decode_state: DecodeState) -> DecodeState:
    """Stops a row; its tokens so far stay with whoever read them."""
    rows = decode_state.rows
    active = self._release(rows.active, np.int32(slot))
    return decode_state._replace(rows=rows._replace(active=active))
