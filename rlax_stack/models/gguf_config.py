"""The metadata of a GGUF file to `ModelConfig`, for the architectures llama, qwen2 and qwen3.

(Mistral and SmolLM2 call themselves llama there.) Llama 3's rotary scaling is stored as one divisor
per
frequency: where it is exactly what llama3 scaling gives, it becomes that; else it is kept as it
  stands.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlax_stack.errors import ConfigError, ModelFileError
from rlax_stack.models.config import ModelConfig, RopeScaling
from rlax_stack.models.rope import rope_factors

_ARCHITECTURES = ('llama', 'qwen2', 'qwen3')
_REFUSED = ('expert_count', 'attention.sliding_window_pattern', 'logit_scale')
_ORIGINAL_CONTEXT = 8192  # of every Llama 3


def config_from_gguf(
  metadata: Mapping[str, Any],
  *,
  source: str,
  vocab_size: int,
  tied: bool,
  frequency_factors: np.ndarray | None,
) -> ModelConfig:
  """Reads the shape of the model.

  Args:
    metadata: of the file.
    source: the file's name, for messages.
    vocab_size: rows of the embedding.
    tied: the file has no output tensor.
    frequency_factors: its `rope_freqs`, float32 [head_dim / 2], or None.

  Raises:
    ModelFileError: another architecture, a missing or impossible field, or an unsupported feature.
  """
  family = metadata.get('general.architecture')
  if family not in _ARCHITECTURES:
    raise ModelFileError(
      f'{source}: architecture {family!r} is not supported. Use one of {", ".join(_ARCHITECTURES)}.'
    )

  def field(name: str, default: Any = None) -> Any:
    value = metadata.get(f'{family}.{name}', default)
    if value is None or isinstance(value, str | list | np.ndarray):
      raise ModelFileError(
        f'{source}: metadata {family}.{name} is {str(value)[:80]}, expected one number.'
      )
    return value

  for name in _REFUSED:
    if metadata.get(f'{family}.{name}', 0) not in (0, 1.0):
      raise ModelFileError(f'{source}: {family}.{name} is not supported: not a plain decoder.')
  heads = field('attention.head_count')
  hidden = field('embedding_length')
  head_dim = field('attention.key_length', _head_dim(source, hidden, heads))
  for name in ('rope.dimension_count', 'attention.value_length'):
    if field(name, head_dim) != head_dim:
      raise ModelFileError(f'{source}: {family}.{name} must equal the head size {head_dim}.')
  window = metadata.get(f'{family}.attention.sliding_window') or None
  try:
    return ModelConfig(
      vocab_size=vocab_size,
      hidden_size=hidden,
      intermediate_size=field('feed_forward_length'),
      num_layers=field('block_count'),
      num_heads=heads,
      num_kv_heads=field('attention.head_count_kv', heads),
      head_dim=head_dim,
      rope_theta=_shortest(field('rope.freq_base', 10000.0)),
      rope_scaling=_scaling(metadata, family, source, frequency_factors, head_dim),
      rms_norm_eps=_shortest(field('attention.layer_norm_rms_epsilon')),
      tie_embeddings=tied,
      attention_bias=family == 'qwen2',
      qk_norm=family == 'qwen3',
      sliding_window=window,
      max_context=field('context_length'),
    )
  except ConfigError as error:
    raise ModelFileError(f'{source}: {error}') from error


def _head_dim(source: str, hidden: Any, heads: Any) -> int:
  if type(hidden) is not int or type(heads) is not int or heads <= 0 or hidden % heads:
    raise ModelFileError(
      f'{source}: attention.head_count must divide embedding_length, got {heads!r} and {hidden!r}.'
    )
  return hidden // heads


def _shortest(value: Any) -> Any:
  """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
  return float(str(np.float32(value))) if isinstance(value, float) else value


def _scaling(
  metadata: Mapping[str, Any],
  family: str,
  source: str,
  frequency_factors: np.ndarray | None,
  head_dim: Any,
) -> RopeScaling | None:
  kind = metadata.get(f'{family}.rope.scaling.type', 'none')
  if kind not in ('none', 'linear') or (kind == 'linear' and frequency_factors is not None):
    raise ModelFileError(f'{source}: rotary scaling {kind!r} with factors is not supported.')
  if kind == 'linear':
    factor = metadata.get(f'{family}.rope.scaling.factor', 1.0)
    return None if factor == 1.0 else RopeScaling(kind='linear', factor=_shortest(factor))
  if frequency_factors is None or np.all(frequency_factors == 1.0):
    return None
  theta = metadata.get(f'{family}.rope.freq_base', 10000.0)
  largest = float(frequency_factors.max())
  if largest > 1.0 and np.isfinite(largest) and 2 * len(frequency_factors) == head_dim:
    llama3 = RopeScaling(
      kind='llama3', factor=_shortest(largest), original_max_position=_ORIGINAL_CONTEXT
    )
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    expected = rope_factors(llama3, np.float64(theta) ** -exponents)
    if np.allclose(frequency_factors, expected, rtol=1e-5, atol=0):
      return llama3
  return RopeScaling(kind='factors', factors=tuple(_shortest(float(f)) for f in frequency_factors))
