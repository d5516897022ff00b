"""Causal attention of others over separate sequences, to hold the packed form of a group against.

`jax.nn.dot_product_attention` in plain XLA runs everywhere, its cuDNN form on GPUs; tokamax's own kernels
(https://github.com/openxla/tokamax) on GPUs and TPUs where it is installed, which nothing here needs.

Not for what is timed or printed (`kernels`). Invariant: a peer that does not run here says why.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_PLATFORMS = {'xla': ('cpu', 'gpu', 'tpu'), 'cudnn': ('gpu',), 'tokamax': ('gpu', 'tpu')}
PEERS = tuple(_PLATFORMS)


def peer(name: str, platform: str) -> Attend | str:
  """The attention called `name`, or why it is not there.

  Args:
    name: one of PEERS.
    platform: of the device, 'cpu', 'gpu' or 'tpu'.

  Returns:
    Function (q [R, T, H, Dh], k [R, T, K, Dh], v) -> [R, T, H, Dh], or the reason.
  """
  if platform not in _PLATFORMS[name]:
    return f'it is for {" and ".join(_PLATFORMS[name])}, and this is {platform}'
  attend = jax.nn.dot_product_attention
  if name == 'xla':
    return functools.partial(attend, is_causal=True, implementation='xla')
  if name == 'cudnn':
    return functools.partial(attend, is_causal=True, implementation='cudnn')
  if importlib.util.find_spec('tokamax') is None:
    return 'tokamax is not installed here'
  attend = importlib.import_module('tokamax').dot_product_attention
  return functools.partial(attend, is_causal=True, implementation='mosaic')


def forward_and_backward(attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
  """Output and gradients of q, k and v; the output stands for its own cotangent."""
  out, pull = jax.vjp(attend, q, k, v)
  return out, pull(out)


def copied_decode(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> jax.Array:
  """A decode step of attention over keys and values that every row has a copy of, prompt included.

  Args:
    q: [M, H, Dh].
    k, v: [L, M, K, T, Dh].
    layer: int32 scalar.

  Returns:
    [M, H, Dh].
  """
  k, v = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (k, v))
  rows, heads, width = q.shape
  queries = q.reshape(rows, k.shape[1], -1, width) * width**-0.5
  scores = jax.lax.dot_general(k, queries, (((3,), (3,)), ((0, 1), (0, 1))))
  weights = jax.nn.softmax(scores, axis=2)
  out = jax.lax.dot_general(weights, v, (((2,), (2,)), ((0, 1), (0, 1))))
  return out.reshape(rows, heads, width)
