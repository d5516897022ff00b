"""Shapes of well-known decoders, by name: what a plan needs of a model whose files are not at hand.

Not for training: a shape has no weights and no tokenizer. `config.model.path=shape:qwen3_8b` names one; dashes and
underscores are the same.
"""

import dataclasses

from rlax_stack.errors import ModelFileError
from rlax_stack.models.config import ModelConfig, RopeScaling

SCHEME = 'shape:'

_QWEN3 = ModelConfig(
  vocab_size=151936,
  hidden_size=4096,
  intermediate_size=12288,
  num_layers=36,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  rope_theta=1e6,
  rms_norm_eps=1e-6,
  tie_embeddings=False,
  qk_norm=True,
  max_context=40960,
)
_LLAMA3 = ModelConfig(
  vocab_size=128256,
  hidden_size=4096,
  intermediate_size=14336,
  num_layers=32,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  rope_theta=5e5,
  rope_scaling=RopeScaling(kind='llama3', factor=8.0),
  tie_embeddings=False,
  max_context=131072,
)


def _qwen3(hidden: int, feed_forward: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
  return dataclasses.replace(
    _QWEN3,
    hidden_size=hidden,
    intermediate_size=feed_forward,
    num_layers=layers,
    num_heads=heads,
    tie_embeddings=tied,
  )


def _qwen3_moe(hidden: int, layers: int, heads: int, width: int) -> ModelConfig:
  return dataclasses.replace(
    _qwen3(hidden, 3 * hidden, layers, heads, tied=False),
    num_kv_heads=4,
    num_experts=128,
    experts_per_token=8,
    moe_intermediate_size=width,
  )


def _mixtral(hidden: int, width: int, layers: int, heads: int, max_context: int) -> ModelConfig:
  return ModelConfig(
    vocab_size=32000,
    hidden_size=hidden,
    intermediate_size=width,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    tie_embeddings=False,
    max_context=max_context,
    num_experts=8,
    experts_per_token=2,
    moe_intermediate_size=width,
  )


SHAPES = {
  'smollm2_135m': ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=1e5,
    max_context=8192,
  ),
  'qwen3_0p6b': _qwen3(1024, 3072, 28, 16, tied=True),
  'qwen3_1p7b': _qwen3(2048, 6144, 28, 16, tied=True),
  'qwen3_4b': _qwen3(2560, 9728, 36, 32, tied=True),
  'qwen3_8b': _QWEN3,
  'qwen3_14b': _qwen3(5120, 17408, 40, 40, tied=False),
  'qwen3_32b': _qwen3(5120, 25600, 64, 64, tied=False),
  'qwen3_30b_a3b': _qwen3_moe(2048, 48, 32, 768),
  'qwen3_235b_a22b': _qwen3_moe(4096, 94, 64, 1536),
  'llama3_8b': _LLAMA3,
  'llama3_70b': dataclasses.replace(
    _LLAMA3, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
  ),
  'mixtral_8x7b': _mixtral(4096, 14336, 32, 32, 32768),
  'mixtral_8x22b': _mixtral(6144, 16384, 56, 48, 65536),
}


def known_shape(path: str) -> ModelConfig:
  """The shape that a path `shape:NAME` names.

  Raises:
    ModelFileError: no such shape.
  """
  name = path.removeprefix(SCHEME).replace('-', '_')
  if name not in SHAPES:
    raise ModelFileError(f'{path}: no such shape. There are {", ".join(SHAPES)}.')
  return SHAPES[name]
