"""What this machine can do: the rate of matrix products at a model's own shapes, measured here and
now.

For dividing a benchmark's figure by. Not a specification: the rate of a busy machine is that of a
busy machine.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlax_stack.models.config import ModelConfig


def best_seconds(function: Callable[[], Any], *, budget_s: float = 1.0) -> float:
  """Shortest time of one call, seconds, over as many calls as fit the budget (two at least)."""
  jax.block_until_ready(function())
  best, spent, calls = float('inf'), 0.0, 0
  while calls < 2 or spent < budget_s:
    start = time.perf_counter()
    jax.block_until_ready(function())
    elapsed = time.perf_counter() - start
    best, spent, calls = min(best, elapsed), spent + elapsed, calls + 1
  return best


def matmul_flops_per_s(
  config: ModelConfig, tokens: int, dtype: Any, *, budget_s: float = 1.0
) -> dict[str, float]:
  """FLOP/s of the products of one layer and of the LM head.

  Args:
    config: the model.
    tokens: rows of the products, as many as the benchmark computes at once.
    dtype: of both operands.
    budget_s: time for each product.

  Returns: rate by name of the product.
  """
  hidden, inner = config.hidden_size, config.intermediate_size
  shapes = {
    'mlp_up': (tokens, hidden, inner),
    'mlp_down': (tokens, inner, hidden),
    'mlp_gradient': (inner, tokens, hidden),
    'lm_head': (min(tokens, 512), hidden, config.vocab_size),
  }
  multiply = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
  rates = {}
  for name, (rows, inside, columns) in shapes.items():
    x, w = jnp.ones((rows, inside), dtype), jnp.ones((columns, inside), dtype)
    seconds = best_seconds(lambda x=x, w=w: multiply(x, w), budget_s=budget_s)
    rates[name] = 2 * rows * inside * columns / seconds
  return rates


def layer_parameters(config: ModelConfig) -> int:
  """Parameters of all layers' matrices: each costs 2 FLOP a token forward and 4 backward."""
  queries = config.num_heads * config.head_dim
  keys = config.num_kv_heads * config.head_dim
  attention = config.hidden_size * (2 * queries + 2 * keys)
  return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
