"""The least time a rollout can take on this machine, from rates measured here and now.

Every matrix product of the model is timed at its own shape, with as many rows as the workload has, in the best of
four layouts; memory is timed by reading and by copying more than any cache holds. A step of decode cannot be quicker
than its products at those rates, nor than reading the weights and the KV it needs at that bandwidth. Each prompt is
computed once.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.models.config import ModelConfig

_BUDGET_S = 0.5  # time given to each measurement
_MEMORY_BYTES = 2**28


class Workload(NamedTuple):
  """`prompts` prompts of `prompt_tokens`, `samples` samples of `new_tokens` each."""

  prompts: int
  samples: int
  prompt_tokens: int
  new_tokens: int

  @property
  def rows(self) -> int:
    """Samples decoded together."""
    return self.prompts * self.samples


class Limit(NamedTuple):
  """Least seconds of a workload, and the measured rates it follows from."""

  prefill_s: float
  decode_s: float
  prefill_flops_per_s: float
  decode_flops_per_s: float
  bytes_per_s: float


def best_seconds(function: Callable[..., Any], *args: Any) -> float:
  """Shortest time of one call over half a second of calls, three at least."""
  jax.block_until_ready(function(*args))
  best, spent, calls = float('inf'), 0.0, 0
  while calls < 3 or spent < _BUDGET_S:
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    elapsed = time.perf_counter() - start
    best, spent, calls = min(best, elapsed), spent + elapsed, calls + 1
  return best


def product_flops_per_s(rows: int, inside: int, outside: int, dtype: Any) -> float:
  """Best FLOP/s of [rows, inside] x [inside, outside] over the layouts of weights and activations."""
  weights, rows_first = jnp.ones((outside, inside), dtype), jnp.ones((rows, inside), dtype)
  layouts = (
    (lambda w, x: x @ w, weights.T.copy(), rows_first),
    (lambda w, x: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))), weights, rows_first),
    (lambda w, x: jax.lax.dot_general(w, x, (((1,), (1,)), ((), ()))), weights, rows_first),
    (lambda w, x: w @ x, weights, rows_first.T.copy()),
  )
  seconds = min(best_seconds(jax.jit(f), w, x) for f, w, x in layouts)
  return 2 * rows * inside * outside / seconds


def memory_bytes_per_s() -> float:
  """Best of reading and of copying an array larger than the caches, bytes moved per second."""
  x = jnp.ones((_MEMORY_BYTES // 4,), jnp.float32).reshape(-1, 1024)
  read = x.nbytes / best_seconds(jax.jit(lambda y: jnp.sum(y, axis=1)), x)
  copied = 2 * x.nbytes / best_seconds(jax.jit(lambda y: y + 1), x)
  return max(read, copied)


def layer_products(config: ModelConfig) -> dict[str, tuple[int, int]]:
  """(inside, outside) of the products of one layer."""
  hidden, inner = config.hidden_size, config.intermediate_size
  queries = config.num_heads * config.head_dim
  return {
    'qkv': (hidden, queries + 2 * config.num_kv_heads * config.head_dim),
    'o': (queries, hidden),
    'gate_up': (hidden, 2 * inner),
    'down': (inner, hidden),
  }


class _Rates:
  """Times one token row costs, by number of rows; measured once each."""

  def __init__(self, config: ModelConfig, dtype: Any):
    self._config, self._dtype = config, dtype
    self._bytes = jnp.dtype(dtype).itemsize
    self.bytes_per_s = memory_bytes_per_s()

  def _product_s(self, rows: int, inside: int, outside: int) -> tuple[float, float]:
    flops = 2.0 * rows * inside * outside
    seconds = flops / product_flops_per_s(rows, inside, outside, self._dtype)
    # The measured product finds its weights in the cache; a step of the whole model does not.
    return max(seconds, inside * outside * self._bytes / self.bytes_per_s), flops

  def layers(self, rows: int) -> tuple[float, float]:
    """Seconds and FLOP of all layers' products over `rows` tokens."""
    parts = [self._product_s(rows, *shape) for shape in layer_products(self._config).values()]
    count = self._config.num_layers
    return count * sum(s for s, _ in parts), count * sum(f for _, f in parts)

  def head(self, rows: int) -> tuple[float, float]:
    """Seconds and FLOP of the LM head over `rows` tokens."""
    return self._product_s(rows, self._config.hidden_size, self._config.vocab_size)


def attention_flops(config: ModelConfig, pairs: float) -> float:
  """FLOP of scores and weighted values over (query, key) pairs, all layers and heads."""
  return 4.0 * config.num_layers * config.num_heads * config.head_dim * pairs


def least_seconds(config: ModelConfig, work: Workload, dtype: Any) -> Limit:
  """Limit of a workload: prefill of each prompt once, then new_tokens - 1 steps of all rows."""
  rates = _Rates(config, dtype)
  tokens = work.prompts * work.prompt_tokens
  # Products of 512 rows and more run at one rate; larger ones are only slower to measure.
  measured = min(tokens, 512)
  layers_s, layers_flops = rates.layers(measured)
  prefill_rate = layers_flops / layers_s
  pairs = work.prompts * work.prompt_tokens * (work.prompt_tokens + 1) / 2
  head_s, _ = rates.head(work.prompts)
  prefill_s = layers_s * tokens / measured + attention_flops(config, pairs) / prefill_rate + head_s
  layers_s, layers_flops = rates.layers(work.rows)
  head_s, head_flops = rates.head(work.rows)
  decode_rate = (layers_flops + head_flops) / (layers_s + head_s)
  steps = work.new_tokens - 1
  mean_suffix = (steps + 1) / 2
  pairs = work.rows * (work.prompt_tokens + mean_suffix)
  kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim
  kv_bytes *= jnp.dtype(dtype).itemsize * (tokens + work.rows * mean_suffix)
  attention_s = max(
    attention_flops(config, pairs) / max(decode_rate, prefill_rate), kv_bytes / rates.bytes_per_s
  )
  return Limit(
    prefill_s,
    steps * (layers_s + head_s + attention_s),
    prefill_rate,
    decode_rate,
    rates.bytes_per_s,
  )
