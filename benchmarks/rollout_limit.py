"""The least time a rollout can take on this machine, from rates measured beside it.

A step of decode cannot be quicker than its products at the rate they reach alone (rows, shapes and dtype of the
workload), nor than reading the weights and the KV it needs from memory. Each prompt is computed once.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from benchmarks.limits import Meter, attention_flops, head_product, layer_products
from rlax_stack.models.config import ModelConfig

# Products of so many rows and more run at one rate; larger ones are only slower to measure.
_ENOUGH_ROWS = 512


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
  """Least seconds of a workload, and the rates it follows from."""

  prefill_s: float
  decode_s: float
  prefill_flops_per_s: float
  decode_flops_per_s: float
  bytes_per_s: float

  @property
  def total_s(self) -> float:
    """Prefill and decode."""
    return self.prefill_s + self.decode_s


class RolloutLimit:
  """Measures what a workload needs (`measure`, as often as one likes) and adds it up."""

  def __init__(self, config: ModelConfig, work: Workload, dtype: Any):
    self._config, self._work, self._bytes = config, work, jnp.dtype(dtype).itemsize
    self._tokens = work.prompts * work.prompt_tokens
    self._prefill_rows = min(self._tokens, _ENOUGH_ROWS)
    parts = {'prefill': self._prefill_rows, 'decode': work.rows}
    self._layers = {part: layer_products(config, rows) for part, rows in parts.items()}
    self._heads = {
      'prefill': head_product(config, work.prompts),
      'decode': head_product(config, work.rows),
    }
    products = {
      f'{part}/{name}': product
      for part, layers in self._layers.items()
      for name, product in (layers | {'head': self._heads[part]}).items()
    }
    self._meter = Meter(products, dtype)
    self.measure = self._meter.measure

  def limit(self, *, shortest: bool = False) -> Limit:
    """From the mean time of each product, or from its shortest: the machine's best moments."""
    config, work = self._config, self._work
    bytes_per_s = self._meter.bytes_per_s[shortest]
    layers_s, rate = self._layers_s('prefill', shortest)
    pairs = work.prompts * work.prompt_tokens * (work.prompt_tokens + 1) / 2
    prefill_s = (
      layers_s * self._tokens / self._prefill_rows
      + attention_flops(config, pairs) / rate
      + self._product_s('prefill', 'head', shortest)
    )
    layers_s, decode_rate = self._layers_s('decode', shortest)
    steps, mean_suffix = work.new_tokens - 1, work.new_tokens / 2
    pairs = work.rows * (work.prompt_tokens + mean_suffix)
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self._bytes
    kv_bytes *= self._tokens + work.rows * mean_suffix
    attention_s = max(
      attention_flops(config, pairs) / max(rate, decode_rate), kv_bytes / bytes_per_s
    )
    step_s = layers_s + self._product_s('decode', 'head', shortest) + attention_s
    return Limit(prefill_s, steps * step_s, rate, decode_rate, bytes_per_s)

  def _product_s(self, part: str, name: str, shortest: bool) -> float:
    product = self._heads[part] if name == 'head' else self._layers[part][name]
    # The measured product finds its weights in the cache; a step of the whole model does not.
    from_memory_s = (
      product.inside * product.outside * self._bytes / self._meter.bytes_per_s[shortest]
    )
    return max(self._meter.seconds(f'{part}/{name}')[shortest], from_memory_s)

  def _layers_s(self, part: str, shortest: bool) -> tuple[float, float]:
    """Seconds of all layers' products, and their FLOP per second."""
    layers, count = self._layers[part], self._config.num_layers
    seconds = count * sum(self._product_s(part, name, shortest) for name in layers)
    return seconds, count * sum(product.flops for product in layers.values()) / seconds
