"""Adapters: a few trained numbers beside frozen weights W₀ of a layer's products. LoRA, rsLoRA, DoRA and MiSS.

    lora    W = W₀ + (α/r) B A           A [r, in] random, B [out, r] of zeros
    rslora  W = W₀ + (α/√r) B A
    dora    W = m (W₀ + (α/r) B A) / ‖W₀ + (α/r) B A‖, m [out] at first the norm of each output's weights
    miss    W[o, i] = W₀[o, i] + B[o, i mod r], one B [out, r] of zeros for all shards of r inputs

See "LoRA", Hu et al. (https://arxiv.org/abs/2106.09685), "A Rank Stabilization Scaling Factor for Fine-Tuning with
LoRA", Kalajdzievski (https://arxiv.org/abs/2312.03732), "DoRA", Liu et al. (https://arxiv.org/abs/2402.09353; norms per
output, as in their code, and with their whole gradient), and "MiSS", Kang et al. (https://arxiv.org/abs/2409.15371).

An adapter is a tree of its own: layers/q_proj/{lora_a [L, r, in], lora_b [L, out, r], magnitude [L, out]}, with the
leaves that its kind has. Invariants: a fresh adapter changes nothing (dora: but for rounding); `merge` gives the
weights that `attach` computes with.
"""

import dataclasses
import fnmatch
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlax_stack.errors import ConfigError
from rlax_stack.models import layout
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.frozen import BlockKernel, freeze, is_block_kernel

KINDS = ('lora', 'rslora', 'dora', 'miss')
_SMALLEST = 1e-30  # of a squared norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSettings:
  """What an adapter is.

  kind: one of KINDS. rank: r. alpha: α; miss has none. targets: globs over the names of kernels, such as
  '*_proj/kernel'. base: precision of the frozen weights, see frozen.PRECISIONS. seed: of A.
  """

  kind: str
  rank: int
  alpha: float
  targets: tuple[str, ...]
  base: str = 'float32'
  seed: int = 0

  @property
  def scale(self) -> float:
    """Factor of B A."""
    if self.kind == 'miss':
      return 1.0
    return self.alpha / (math.sqrt(self.rank) if self.kind == 'rslora' else self.rank)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('base', 'a', 'b', 'magnitude'),
  meta_fields=('scale',),
)
@dataclasses.dataclass(frozen=True)
class AdaptedKernel:
  """A frozen kernel with the adapter beside it; `Linear` of models/decoder.py multiplies by both."""

  base: Any  # [..., out, in], an array or a BlockKernel
  a: Any  # [..., r, in]; None: input i goes to i mod r
  b: Any  # [..., out, r]
  magnitude: Any  # [..., out], or None
  scale: float


def adapted_leaves(config: ModelConfig, settings: AdapterSettings) -> list[layout.Leaf]:
  """The kernels that have an adapter, in the order of `layout.leaves`.

  Raises:
    ConfigError: a pattern that matches no kernel, or a rank above a side of a kernel.
  """
  kernels = {
    '/'.join(leaf.path): leaf
    for leaf in layout.leaves(config)
    if leaf.stacked and leaf.path[-1] == 'kernel'
  }
  for pattern in settings.targets:
    if not fnmatch.filter(kernels, pattern):
      raise ConfigError(
        f'config.learner.adapter.targets holds {pattern!r}, which matches no kernel of this model. They are '
        f"{', '.join(kernels)}; '*_proj/kernel' matches all of them."
      )
  found = {
    name: leaf
    for name, leaf in kernels.items()
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.targets)
  }
  for name, leaf in found.items():
    if settings.rank > min(leaf.shape):
      raise ConfigError(
        f'config.learner.adapter.rank={settings.rank} exceeds a side of {name}, which is {leaf.shape[0]} x '
        f'{leaf.shape[1]}. Set it to {min(leaf.shape)} or less, or leave that kernel out of targets.'
      )
  return list(found.values())


def init_adapter(config: ModelConfig, settings: AdapterSettings, base: Any) -> Any:
  """A fresh adapter, float32, that changes nothing.

  Args:
    config: shape of the model.
    settings: see AdapterSettings.
    base: frozen weights, from `frozen.freeze`.
  """
  key, tree = jax.random.key(settings.seed, impl='threefry2x32'), {}
  for index, leaf in enumerate(adapted_leaves(config, settings)):
    (rows, columns), count = leaf.shape, config.num_layers
    parts = {'lora_b': jnp.zeros((count, rows, settings.rank), jnp.float32)}
    if settings.kind != 'miss':
      shape, bound = (count, settings.rank, columns), columns**-0.5
      drawn = jax.random.uniform(jax.random.fold_in(key, index), shape, minval=-bound, maxval=bound)
      parts['lora_a'] = drawn
    if settings.kind == 'dora':
      parts['magnitude'] = jax.lax.map(
        lambda kernel: jnp.sqrt(_squares(dense(kernel))), layout.get_leaf(base, leaf.path)
      )
    layout.set_leaf(tree, leaf.path[:-1], parts)
  return tree


def attach(adapter: Any, base: Any, settings: AdapterSettings) -> Any:
  """The tree of models/decoder.py over `base` in which adapted kernels are AdaptedKernels; copies nothing."""

  def one(path, kernel):
    parts = _parts_at(adapter, path)
    if parts is None:
      return kernel
    return AdaptedKernel(
      kernel, parts.get('lora_a'), parts['lora_b'], parts.get('magnitude'), settings.scale
    )

  return jax.tree_util.tree_map_with_path(one, base, is_leaf=is_block_kernel)


def adapted_product(x: jax.Array, kernel: AdaptedKernel, of_base: jax.Array) -> jax.Array:
  """x Wᵀ [M, out] of x [M, in], where `of_base` is x W₀ᵀ; in the dtype of x."""
  b = kernel.b.astype(x.dtype)
  if kernel.a is None:
    low = _folded(x, b.shape[-1])
  else:
    low = x @ kernel.a.astype(x.dtype).T
  y = of_base + (kernel.scale * low) @ b.T
  if kernel.magnitude is None:
    return y
  factor = kernel.magnitude / jnp.sqrt(_squared_norms(kernel))
  return y * factor.astype(x.dtype)[None]


def merge(adapter: Any, base: Any, settings: AdapterSettings, dtype: Any = jnp.float32) -> Any:
  """Plain weights that give what `base` gives with the adapter: computed in float32, in `dtype`."""

  def one(path, kernel):
    parts = _parts_at(adapter, path)
    if parts is None:
      return _dense_layers(kernel, dtype) if is_block_kernel(kernel) else jnp.asarray(kernel, dtype)
    return _merged_layers(kernel, parts, settings.scale, dtype)

  return jax.tree_util.tree_map_with_path(one, base, is_leaf=is_block_kernel)


def model_weights(settings: AdapterSettings | None, trained: Any, *frozen: Any) -> Any:
  """What the decoder takes: `trained` itself, or the adapter `trained` beside the one tree `frozen`."""
  if settings is None:
    return trained
  (base,) = frozen
  return attach(trained, base, settings)


def abstract_weights(
  settings: AdapterSettings | None, config: ModelConfig, params: Any
) -> tuple[Any, tuple[Any, ...]]:
  """Shapes and dtypes of what is trained, and of the frozen trees: one under an adapter, else none.

  Args:
    settings: of the adapter, None without one.
    config: shape of the model.
    params: of the whole model, arrays or shapes.
  """
  if settings is None:
    return params, ()
  base = jax.eval_shape(functools.partial(freeze, precision=settings.base), params)
  return jax.eval_shape(functools.partial(init_adapter, config, settings), base), (base,)


def dense(kernel: Any) -> jax.Array:
  """A frozen kernel as a float32 array."""
  return kernel.dequantised() if is_block_kernel(kernel) else kernel.astype(jnp.float32)


def _parts_at(adapter: Any, path: tuple[Any, ...]) -> Any:
  """The leaves that an adapter has for the kernel at `path` of the model's tree; None where it has none."""
  if path[-1].key != 'kernel' or path[0].key != 'layers':
    return None
  return adapter.get('layers', {}).get(path[1].key)


def _folded(x: jax.Array, rank: int) -> jax.Array:
  """[M, in] -> [M, rank]: sums over all inputs i of one i mod rank."""
  padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % rank)))
  return padded.reshape(x.shape[0], -1, rank).sum(axis=1)


def _squares(kernel: jax.Array) -> jax.Array:
  return jnp.sum(jnp.square(kernel), axis=-1)


def _squared_norms(kernel: AdaptedKernel) -> jax.Array:
  """‖W₀ + s B A‖² of every output, float32 [out], from products with A alone: no array of the size of W₀ is kept."""
  base: Any = kernel.base

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def of_base(base: Any, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    full = dense(base)
    return _squares(full), jnp.matmul(full, a.T, precision='highest')

  squares, cross = of_base(base, kernel.a)
  gram = jnp.matmul(kernel.a, kernel.a.T, precision='highest')
  spread = jnp.matmul(kernel.b, gram, precision='highest')
  s = kernel.scale
  added = 2 * s * jnp.sum(cross * kernel.b, -1) + s * s * jnp.sum(spread * kernel.b, -1)
  return jnp.maximum(squares + added, _SMALLEST)


def _merged(kernel: Any, parts: Any, scale: float) -> jax.Array:
  full, b = dense(kernel), parts['lora_b']
  if 'lora_a' in parts:
    full = full + scale * jnp.matmul(b, parts['lora_a'], precision='highest')
  else:
    full = full + scale * b[:, jnp.arange(full.shape[1]) % b.shape[1]]
  if 'magnitude' in parts:
    full = full * (parts['magnitude'] / jnp.sqrt(jnp.maximum(_squares(full), _SMALLEST)))[:, None]
  return full


@functools.partial(jax.jit, static_argnames=('scale', 'dtype'))
def _merged_layers(kernel: Any, parts: Any, scale: float, dtype: Any) -> jax.Array:
  return jax.lax.map(
    lambda layer: _merged(layer[0], layer[1], scale).astype(dtype), (kernel, parts)
  )


@functools.partial(jax.jit, static_argnames='dtype')
def _dense_layers(kernel: BlockKernel, dtype: Any) -> jax.Array:
  return jax.lax.map(lambda layer: layer.dequantised(dtype), kernel)
