"""What this machine can do while a benchmark runs on it: rates of matrix products and of memory.

For dividing a benchmark's figure by. A machine that others share changes its pace by half from one second to the next,
and a step of many seconds gets the mean of that pace. So a limit is measured after every repetition of the workload and
over as many calls as fill its time, and the means of both are compared. The shortest single call is kept too: it gives
the limit of the machine's best moments.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.models.config import ModelConfig

_BUDGET_S = 0.4  # time given to each measurement
_MEMORY_BYTES = 2**28


class Product(NamedTuple):
  """[rows, inside] x [inside, outside]."""

  rows: int
  inside: int
  outside: int

  @property
  def flops(self) -> float:
    """Two for each multiply-add."""
    return 2.0 * self.rows * self.inside * self.outside


class Seconds(NamedTuple):
  """Of one call: the mean over all that were measured, and the shortest."""

  mean: float
  shortest: float


class Rate(NamedTuple):
  """Per second, at the mean and at the shortest time of a call."""

  mean: float
  best: float


def layer_products(config: ModelConfig, rows: int) -> dict[str, Product]:
  """The products of one layer over `rows` tokens."""
  hidden, inner = config.hidden_size, config.intermediate_size
  queries = config.num_heads * config.head_dim
  keys = config.num_kv_heads * config.head_dim
  return {
    'qkv': Product(rows, hidden, queries + 2 * keys),
    'o': Product(rows, queries, hidden),
    'gate_up': Product(rows, hidden, 2 * inner),
    'down': Product(rows, inner, hidden),
  }


def head_product(config: ModelConfig, rows: int) -> Product:
  """The LM head over `rows` tokens."""
  return Product(rows, config.hidden_size, config.vocab_size)


def attention_flops(config: ModelConfig, pairs: float) -> float:
  """FLOP of scores and weighted values over (query, key) pairs, all layers and heads."""
  return 4.0 * config.num_layers * config.num_heads * config.head_dim * pairs


class Meter:
  """Times a set of products, each in the best of four layouts of weights and activations, and memory.

  `measure` may be called as often as one likes; the figures are over all calls.

  Args:
    products: by name.
    dtype: of both operands.
  """

  def __init__(self, products: dict[str, Product], dtype: Any):
    self._products = products
    self._calls = {name: _best_layout(product, dtype) for name, product in products.items()}
    x = jnp.ones((_MEMORY_BYTES // 4,), jnp.float32).reshape(-1, 1024)
    read = jax.jit(lambda y: jnp.sum(y, axis=1))
    self._calls['memory'] = lambda: read(x)
    self._seconds: dict[str, list[float]] = {name: [] for name in self._calls}

  def measure(self) -> None:
    """One round over everything, about half a second each."""
    for name, call in self._calls.items():
      self._seconds[name].extend(_timed(call, _BUDGET_S))

  def seconds(self, name: str) -> Seconds:
    """Of one call of a product."""
    return Seconds(float(np.mean(self._seconds[name])), min(self._seconds[name]))

  def flops_per_s(self, name: str) -> Rate:
    """Of a product."""
    mean, shortest = self.seconds(name)
    flops = self._products[name].flops
    return Rate(flops / mean, flops / shortest)

  @property
  def bytes_per_s(self) -> Rate:
    """Of reading an array that no cache holds."""
    mean, shortest = self.seconds('memory')
    return Rate(_MEMORY_BYTES / mean, _MEMORY_BYTES / shortest)


def _timed(call: Callable[[], Any], budget_s: float) -> list[float]:
  """Seconds of each call, over as many as fit the budget, three at least."""
  seconds: list[float] = []
  while len(seconds) < 3 or sum(seconds) < budget_s:
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return seconds


def _best_layout(product: Product, dtype: Any) -> Callable[[], Any]:
  """A call of the product in the layout that is quickest here, compiled."""
  rows, inside, outside = product
  weights, tokens = jnp.ones((outside, inside), dtype), jnp.ones((rows, inside), dtype)
  columns = tokens.T.copy()
  by_last = (((1,), (1,)), ((), ()))
  layouts = (
    (lambda w, x: x @ w, weights.T.copy(), tokens),
    (lambda w, x: jax.lax.dot_general(x, w, by_last), weights, tokens),
    (lambda w, x: jax.lax.dot_general(w, x, by_last), weights, tokens),
    (lambda w, x: w @ x, weights, columns),
  )
  calls = [functools.partial(jax.jit(f), w, x) for f, w, x in layouts]
  for call in calls:
    jax.block_until_ready(call())
  return min(calls, key=lambda call: float(np.median(_timed(call, _BUDGET_S / 2))))
