"""Static sizes of an engine and the arrays that live on the device between its calls."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.errors import ConfigError
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.quantised import KERNEL_KINDS
from rlax_stack.rollout.logit_controls import LogitControls, TokenCounts, no_controls, no_counts
from rlax_stack.rollout.quantise import KV_KINDS, KVTable, empty_table
from rlax_stack.rollout.sampler import RowSampling

RUNNING, STOPPED, LENGTH = 0, 1, 2  # values of RowState.finish
_MAX_LISTED_PAGES = 8192  # of all rows' own tokens; a page is eight integers in a kernel's list


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


def _power_of_two(value: int) -> int:
  return 1 << max(0, value - 1).bit_length()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """Static sizes; everything that is compiled depends on these and on the model only.

  slots: rows decoded together. max_prompt_tokens, max_new_tokens: longest prompt and longest sample, in tokens.
  chunk_steps: decode steps per host round trip at most. page_size: tokens of a prefix page; 0 chooses.
  prefix_pages: pages in the table; 0 gives every slot a prompt of its own, or 32,768 tokens if that is less.
  rows_per_block: rows of a group that share one read of a page. suffix_page_size: tokens of a page of a row's own
  tokens; 0 chooses. suffix_pages: how many of those; 0 gives every slot enough for the longest sample, fewer save
  memory (rows that find none are set back and go on later).
  prefill_tokens: prompts are prefilled together up to about this many tokens. prefill_chunk: longer prefixes are
  computed in pieces of this many tokens, a multiple of page_size; 0 chooses. prefill_budget: tokens prefilled between
  two decode chunks at most, so that long prompts do not hold up the rows that decode. max_stop_ids: stop tokens per
  request. logit_controls: whether requests may change logits (biases, penalties, min_tokens). max_logit_bias: biased
  tokens per request then. max_top_log_probs: likeliest tokens per position that a request may ask for.
  kept_tokens: ids of each sampled token's kept set that are recorded at most; 0 records none.
  record_experts: whether the experts that every token of a mixture went through are recorded.
  max_draft: proposed tokens of a row that idle columns check in one step (speculation.py); 0 checks none.
  draft_weights: 'none', or one of models.quantised.KERNEL_KINDS: a copy of the weights, quantised so, proposes tokens
  while at most draft_rows rows decode; draft_rows 0 takes a quarter of the slots.
  compute_dtype: of weights, activations and KV; softmax and log-probs are float32 always.
  weights: 'same' keeps the kernels of the layers in compute_dtype, else one of models.quantised.KERNEL_KINDS.
  kv: 'same' keeps keys and values in compute_dtype, else one of quantise.KV_KINDS.
  kernels: form of the kernels, 'auto', 'pallas' or 'xla'.
  """

  slots: int = 64
  max_prompt_tokens: int = 256
  max_new_tokens: int = 64
  chunk_steps: int = 16
  page_size: int = 0
  prefix_pages: int = 0
  rows_per_block: int = 8
  suffix_page_size: int = 0
  suffix_pages: int = 0
  prefill_tokens: int = 256
  prefill_chunk: int = 0
  prefill_budget: int = 8192
  max_stop_ids: int = 8
  logit_controls: bool = False
  max_logit_bias: int = 16
  max_top_log_probs: int = 0
  kept_tokens: int = 0
  record_experts: bool = False
  max_draft: int = 0
  draft_weights: str = 'none'
  draft_rows: int = 0
  compute_dtype: Any = jnp.float32
  weights: str = 'same'
  kv: str = 'same'
  kernels: str = 'auto'

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is not int:
        continue
      least = 0 if field.default == 0 else 1
      if value < least:
        raise ConfigError(f'EngineConfig.{field.name} must be at least {least}, got {value}.')
    weights, kv = ('same', *KERNEL_KINDS), ('same', *KV_KINDS)
    choices = {'weights': weights, 'kv': kv, 'draft_weights': ('none', *KERNEL_KINDS)}
    for name, kinds in choices.items():
      if getattr(self, name) not in kinds:
        raise ConfigError(
          f'EngineConfig.{name} must be one of {", ".join(kinds)}, got {getattr(self, name)!r}.'
        )
    page = self.page_size or min(256, max(16, _power_of_two(self.max_prompt_tokens)))
    # Many rows: small pages, because what a page reads beyond a row's own tokens is wasted bandwidth.
    own_page = self.suffix_page_size or self._own_page()
    per_prompt = -(-self.max_prompt_tokens // page)
    pages = self.prefix_pages or max(per_prompt, min(self.slots * per_prompt, 32768 // page))
    if pages < per_prompt:
      raise ConfigError(
        f'EngineConfig.prefix_pages={pages} cannot hold one prompt of max_prompt_tokens='
        f'{self.max_prompt_tokens} in pages of {page}. Set prefix_pages to at least {per_prompt}.'
      )
    chunk = min(self.prefill_chunk or max(1, 2048 // page) * page, per_prompt * page)
    if chunk % page:
      raise ConfigError(
        f'EngineConfig.prefill_chunk={chunk} must be a multiple of page_size={page}.'
      )
    if self.max_draft and self.logit_controls:
      raise ConfigError(
        f'EngineConfig.max_draft={self.max_draft} does not go with logit_controls, whose counts follow token by '
        'token. Set one of them off.'
      )
    if self.draft_weights != 'none' and not (self.max_draft and self.weights == 'same'):
      raise ConfigError(
        f'EngineConfig.draft_weights={self.draft_weights} needs max_draft above 0 and weights=same, got max_draft='
        f'{self.max_draft} and weights={self.weights}: a copy that is no smaller than the weights saves nothing.'
      )
    per_sample = -(-self.max_new_tokens // own_page)
    own_pages = self.suffix_pages or self.slots * per_sample
    if own_pages < per_sample:
      raise ConfigError(
        f'EngineConfig.suffix_pages={own_pages} cannot hold one sample of max_new_tokens='
        f'{self.max_new_tokens} in pages of {own_page}. Set suffix_pages to at least {per_sample}.'
      )
    chosen = {
      'draft_rows': self.draft_rows or max(1, self.slots // 4),
      'page_size': page,
      'prefix_pages': pages,
      'prefill_chunk': chunk,
    }
    chosen |= {'suffix_page_size': own_page, 'suffix_pages': own_pages}
    for name, value in chosen.items():
      object.__setattr__(self, name, value)

  def _own_page(self) -> int:
    """Tokens of a suffix page: few, but not so few that the list of pages outgrows a TPU's scalar memory."""
    size = max(16, min(64, 1024 // self.slots))
    while self.slots * -(-self.max_new_tokens // size) > _MAX_LISTED_PAGES:
      size *= 2
    return min(_round_up(self.max_new_tokens, 8), size)

  @property
  def pages_per_prompt(self) -> int:
    """Pages of the longest prompt."""
    return -(-self.max_prompt_tokens // self.page_size)

  @property
  def max_text_tokens(self) -> int:
    """Tokens of the longest text that can be scored: a prompt and a sample."""
    return self.max_prompt_tokens + self.max_new_tokens

  @property
  def max_prefix_tokens(self) -> int:
    """Tokens of the longest prefix: a prompt and all of a sample but its last token, computed anew."""
    return self.max_text_tokens - 1

  @property
  def pages_per_prefix(self) -> int:
    """Pages of the longest prefix."""
    return -(-self.max_prefix_tokens // self.page_size)

  @property
  def pages_per_sample(self) -> int:
    """Suffix pages of the longest sample."""
    return -(-self.max_new_tokens // self.suffix_page_size)

  @property
  def max_items(self) -> int:
    """Work items if no two rows share a prefix."""
    return self.slots * self.pages_per_prefix

  @property
  def prompt_buckets(self) -> tuple[int, ...]:
    """Padded lengths of first pieces, a multiple of the page each; few, because each is a compiled program."""
    longest = min(self.pages_per_prompt * self.page_size, self.prefill_chunk)
    shorter = [longest // 4 // self.page_size * self.page_size] if longest > self.page_size else []
    return tuple(sorted({longest, *(size for size in shorter if size)}))

  def prefill_batches(self, bucket: int) -> tuple[int, ...]:
    """Numbers of prompts, ascending, for which a prefill program of this bucket exists."""
    many = self.prefill_tokens // bucket
    return (max(1, many),)


class RowState(NamedTuple):
  """What each of the M slots is doing. `token` is the newest token of the row, not yet in its suffix KV."""

  token: Any  # int32 [M]
  position: Any  # int32 [M], of `token`
  count: Any  # int32 [M], tokens sampled
  max_tokens: Any  # int32 [M]
  active: Any  # bool [M]
  finish: Any  # int32 [M]: RUNNING, STOPPED or LENGTH
  sampling: RowSampling
  key: Any  # uint32 [M, 2], identity of the sample
  stop_ids: Any  # int32 [M, max_stop_ids], -1 where unused
  top_log_probs: Any  # int32 [M], how many of the likeliest tokens are wanted
  controls: LogitControls | None  # None without logit_controls
  counts: TokenCounts | None


class DecodeState(NamedTuple):
  """Everything an engine holds on the device but the weights; donated by every call that changes it."""

  prefix_k: KVTable  # [L, pages, K, page_size, Dh]
  prefix_v: KVTable
  prefix_logits: jax.Array  # float32 [entries, V], of each prompt's last token
  suffix_k: KVTable  # [L, suffix_pages, K, suffix_page_size, Dh]
  suffix_v: KVTable
  rows: RowState


class NewRows(NamedTuple):
  """Rows to start, one value per slot; only slots with `start` are touched."""

  start: Any  # bool [M]
  entry: Any  # int32 [M], row of prefix_logits
  prefix_length: Any  # int32 [M]
  max_tokens: Any  # int32 [M]
  forced: Any  # int32 [M], the first token where it is known already, -1 where it is to be sampled
  sampling: RowSampling
  key: Any  # uint32 [M, 2]
  stop_ids: Any  # int32 [M, max_stop_ids]
  top_log_probs: Any  # int32 [M]
  controls: LogitControls | None = None  # the three below only with logit_controls
  prefix: Any = None  # int32 [M, max_prefix_tokens]
  prompt_length: Any = None  # int32 [M], tokens of the prefix that were not sampled


class Prefix(NamedTuple):
  """Prefilled prompts, or pieces of prefixes."""

  k: jax.Array  # [L, B, P, K, Dh]
  v: jax.Array
  logits: jax.Array  # float32 [B, V], of the last position
  experts: jax.Array | None = None  # int16 [L, B, P, k], None without record_experts


class ResultTokens(NamedTuple):
  """Tokens of up to N steps; `valid` says which slots made one in which step."""

  tokens: jax.Array  # int32 [N, M]
  log_probs: jax.Array  # float32 [N, M], of the distribution that was sampled
  raw_log_probs: jax.Array  # float32 [N, M]
  versions: jax.Array  # int32 [N, M], weights version that made the token
  valid: jax.Array  # bool [N, M]
  finish: jax.Array  # int32 [M], state of each slot after the last step
  steps: jax.Array  # int32 [], steps done
  top_ids: jax.Array | None  # int32 [N, M, max_top_log_probs], None where that is 0
  top_log_probs: (
    jax.Array | None
  )  # float32 [N, M, max_top_log_probs], of the model at temperature 1
  kept_ids: jax.Array | None = None  # int32 [N, M, kept_tokens], see sampler.kept_ids; None where 0
  # int16 [N, M, L, k], of the token before; None without record_experts and for first tokens
  experts: jax.Array | None = None


def empty_result(
  config: ModelConfig,
  engine: EngineConfig,
  shape: tuple[int, ...],
  finish: jax.Array,
  version: jax.Array,
) -> ResultTokens:
  """No token yet, with room for `shape` of them; `finish` [M] and `version` [] as they are."""
  routed = (*shape, config.num_layers, config.experts_per_token)
  tops, kept = engine.max_top_log_probs, engine.kept_tokens
  return ResultTokens(
    tokens=jnp.zeros(shape, jnp.int32),
    log_probs=jnp.zeros(shape, jnp.float32),
    raw_log_probs=jnp.zeros(shape, jnp.float32),
    versions=jnp.full(shape, version, jnp.int32),
    valid=jnp.zeros(shape, jnp.bool_),
    finish=finish,
    steps=jnp.int32(0),
    top_ids=jnp.zeros((*shape, tops), jnp.int32) if tops else None,
    top_log_probs=jnp.zeros((*shape, tops), jnp.float32) if tops else None,
    kept_ids=jnp.full((*shape, kept), -1, jnp.int32) if kept else None,
    experts=jnp.full(routed, -1, jnp.int16) if engine.record_experts else None,
  )


def empty_rows(engine: EngineConfig, vocab_size: int) -> RowState:
  """M idle rows."""
  m = engine.slots

  def zeros(dtype: Any) -> jax.Array:
    return jnp.zeros((m,), dtype)

  return RowState(
    token=zeros(jnp.int32),
    position=zeros(jnp.int32),
    count=zeros(jnp.int32),
    max_tokens=zeros(jnp.int32),
    active=zeros(jnp.bool_),
    finish=zeros(jnp.int32),
    sampling=RowSampling(
      zeros(jnp.float32), zeros(jnp.int32), jnp.ones((m,), jnp.float32), zeros(jnp.float32)
    ),
    key=jnp.zeros((m, 2), jnp.uint32),
    stop_ids=jnp.full((m, engine.max_stop_ids), -1, jnp.int32),
    top_log_probs=zeros(jnp.int32),
    controls=no_controls(m, engine.max_logit_bias) if engine.logit_controls else None,
    counts=no_counts(vocab_size, m) if engine.logit_controls else None,
  )


def empty_state(config: ModelConfig, engine: EngineConfig) -> DecodeState:
  """A state with no prefix and no row; allocates the KV tables once."""
  layers, kv, dim = config.num_layers, config.num_kv_heads, config.head_dim
  kind, dtype = engine.kv, engine.compute_dtype
  prefix = (layers, engine.prefix_pages, kv, engine.page_size, dim)
  suffix = (layers, engine.suffix_pages, kv, engine.suffix_page_size, dim)
  return DecodeState(
    prefix_k=empty_table(prefix, kind, dtype),
    prefix_v=empty_table(prefix, kind, dtype),
    prefix_logits=jnp.zeros((engine.slots, config.vocab_size), jnp.float32),
    suffix_k=empty_table(suffix, kind, dtype),
    suffix_v=empty_table(suffix, kind, dtype),
    rows=empty_rows(engine, config.vocab_size),
  )
