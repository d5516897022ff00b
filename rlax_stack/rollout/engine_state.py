"""Static sizes of an engine and the arrays that live on the device between its calls."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.errors import ConfigError
from rlax_stack.models.config import ModelConfig
from rlax_stack.rollout.sampler import RowSampling

RUNNING, STOPPED, LENGTH = 0, 1, 2  # values of RowState.finish


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
  rows_per_block: rows of a group that share one read of a page. suffix_block: tokens of a suffix block; 0 chooses.
  prefill_tokens: prompts are prefilled together up to about this many tokens. max_stop_ids: stop tokens per request.
  compute_dtype: of weights, activations and KV; softmax and log-probs are float32 always.
  kernels: form of the kernels, 'auto', 'pallas' or 'xla'.
  """

  slots: int = 64
  max_prompt_tokens: int = 256
  max_new_tokens: int = 64
  chunk_steps: int = 16
  page_size: int = 0
  prefix_pages: int = 0
  rows_per_block: int = 8
  suffix_block: int = 0
  prefill_tokens: int = 256
  max_stop_ids: int = 8
  compute_dtype: Any = jnp.float32
  kernels: str = 'auto'

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      least = 0 if field.name in ('page_size', 'prefix_pages', 'suffix_block') else 1
      if field.name not in ('compute_dtype', 'kernels') and value < least:
        raise ConfigError(f'EngineConfig.{field.name} must be at least {least}, got {value}.')
    page = self.page_size or min(256, max(16, _power_of_two(self.max_prompt_tokens)))
    # Many rows: small blocks, because what a block reads beyond a row's own tokens is wasted bandwidth.
    block = self.suffix_block or min(
      _round_up(self.max_new_tokens, 8), max(16, min(64, 1024 // self.slots))
    )
    per_prompt = -(-self.max_prompt_tokens // page)
    pages = self.prefix_pages or max(per_prompt, min(self.slots * per_prompt, 32768 // page))
    if pages < per_prompt:
      raise ConfigError(
        f'EngineConfig.prefix_pages={pages} cannot hold one prompt of max_prompt_tokens='
        f'{self.max_prompt_tokens} in pages of {page}. Set prefix_pages to at least {per_prompt}.'
      )
    object.__setattr__(self, 'page_size', page)
    object.__setattr__(self, 'suffix_block', block)
    object.__setattr__(self, 'prefix_pages', pages)

  @property
  def pages_per_prompt(self) -> int:
    """Pages of the longest prompt."""
    return -(-self.max_prompt_tokens // self.page_size)

  @property
  def suffix_blocks(self) -> int:
    """Blocks that hold the longest sample."""
    return -(-self.max_new_tokens // self.suffix_block)

  @property
  def max_items(self) -> int:
    """Work items if no two rows share a prefix."""
    return self.slots * self.pages_per_prompt

  @property
  def prompt_buckets(self) -> tuple[int, ...]:
    """Padded prompt lengths, a multiple of the page each; few, because each is a compiled program."""
    longest = self.pages_per_prompt * self.page_size
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


class DecodeState(NamedTuple):
  """Everything an engine holds on the device but the weights; donated by every call that changes it."""

  prefix_k: jax.Array  # [L, pages, K, page_size, Dh]
  prefix_v: jax.Array
  prefix_logits: jax.Array  # float32 [entries, V], of each prompt's last token
  suffix_k: jax.Array  # [L, suffix_blocks, M, K, suffix_block, Dh]
  suffix_v: jax.Array
  rows: RowState


class NewRows(NamedTuple):
  """Rows to start, one value per slot; only slots with `start` are touched."""

  start: Any  # bool [M]
  entry: Any  # int32 [M], row of prefix_logits
  prompt_length: Any  # int32 [M]
  max_tokens: Any  # int32 [M]
  sampling: RowSampling
  key: Any  # uint32 [M, 2]
  stop_ids: Any  # int32 [M, max_stop_ids]


class Prefix(NamedTuple):
  """Prefilled prompts."""

  k: jax.Array  # [L, B, P, K, Dh]
  v: jax.Array
  logits: jax.Array  # float32 [B, V], of the last position


class ResultTokens(NamedTuple):
  """Tokens of up to N steps; `valid` says which slots made one in which step."""

  tokens: jax.Array  # int32 [N, M]
  log_probs: jax.Array  # float32 [N, M], of the distribution that was sampled
  raw_log_probs: jax.Array  # float32 [N, M]
  versions: jax.Array  # int32 [N, M], weights version that made the token
  valid: jax.Array  # bool [N, M]
  finish: jax.Array  # int32 [M], state of each slot after the last step
  steps: jax.Array  # int32 [], steps done


def empty_rows(engine: EngineConfig) -> RowState:
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
  )


def empty_state(config: ModelConfig, engine: EngineConfig) -> DecodeState:
  """A state with no prefix and no row; allocates the KV tables once."""
  layers, kv, dim = config.num_layers, config.num_kv_heads, config.head_dim
  dtype = engine.compute_dtype
  prefix = (layers, engine.prefix_pages, kv, engine.page_size, dim)
  suffix = (layers, engine.suffix_blocks, engine.slots, kv, engine.suffix_block, dim)
  return DecodeState(
    prefix_k=jnp.zeros(prefix, dtype),
    prefix_v=jnp.zeros(prefix, dtype),
    prefix_logits=jnp.zeros((engine.slots, config.vocab_size), jnp.float32),
    suffix_k=jnp.zeros(suffix, dtype),
    suffix_v=jnp.zeros(suffix, dtype),
    rows=empty_rows(engine),
  )
