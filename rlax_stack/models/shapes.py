"""Shapes of well-known decoders, by name: what a plan needs of a model whose files are not at hand.

Not for training: a shape has no weights and no tokenizer. `config.model.path=shape:qwen3_8b` names one.
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
  'llama3_8b': _LLAMA3,
  'llama3_70b': dataclasses.replace(
    _LLAMA3, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
  ),
}


def known_shape(path: str) -> ModelConfig:
  """The shape that a path `shape:NAME` names.

  Raises:
    ModelFileError: no such shape.
  """
  name = path.removeprefix(SCHEME)
  if name not in SHAPES:
    raise ModelFileError(f'{path}: no such shape. There are {", ".join(SHAPES)}.')
  return SHAPES[name]
