"""Rotary frequencies of a config, in numpy: the one place that knows what each scaling means."""

import math

import numpy as np

from rlax_stack.models.config import ModelConfig, RopeScaling


def rope_inverse_frequencies(config: ModelConfig, *, local: bool = False) -> np.ndarray:
  """Angle per position of each rotary pair, radians.

  Pair i turns by theta ** (-2i / rotary_dim), then scaled as `config.rope_scaling` says. Computed in
  float64 and rounded once.

  Args:
    config: shape of the model.
    local: of the layers with a window, where `config.local_rope_theta` is theirs; never scaled.

  Returns: float32 [rotary_dim / 2].
  """
  exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
  theta = config.rope_theta
  if local and config.local_rope_theta is not None:
    theta = config.local_rope_theta
  frequencies = 1.0 / np.float64(theta) ** exponents
  if config.rope_scaling is not None and not local:
    frequencies = frequencies / rope_factors(config.rope_scaling, frequencies)
  return frequencies.astype(np.float32)


def rope_factors(scaling: RopeScaling, frequencies: np.ndarray) -> np.ndarray:
  """What each unscaled frequency (float64 [rotary_dim / 2]) is divided by, float64 of the same shape.

  For 'llama3', with L = original_max_position and wavelength w = 2 pi / f: 1 where
  w < L / high_freq_factor, `factor` where w > L / low_freq_factor, and 1 / ((1 - s) / factor + s)
  between, where s = (L / w - low_freq_factor) / (high_freq_factor - low_freq_factor).
  See "The Llama 3 Herd of Models" (https://arxiv.org/abs/2407.21783).
  """
  if scaling.kind == 'factors':
    return np.asarray(scaling.factors, np.float64)
  if scaling.kind == 'linear':
    return np.full_like(frequencies, scaling.factor)
  turns = scaling.original_max_position * frequencies / (2 * math.pi)  # L / w
  span = scaling.high_freq_factor - scaling.low_freq_factor
  smooth = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
  return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
