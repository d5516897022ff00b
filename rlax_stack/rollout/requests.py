"""What is asked of the scheduler and what it gives back, with the checks that come before a device is touched."""

import dataclasses
import math

import numpy as np

from rlax_stack.errors import PromptTooLongError
from rlax_stack.models.config import ModelConfig
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.types import FinishReason, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
  """One sample to draw. (group_id, sample_index) identifies it and, unless `rng_group_id` is given, its randomness.

  With `rng_group_id` the random numbers are those of (rng_group_id, sample_index): the same sample can be drawn again
  under another identity.
  """

  group_id: int
  sample_index: int
  prompt_tokens: np.ndarray  # int32 [P], P >= 1
  sampling: SamplingParams
  rng_group_id: int | None = None

  @property
  def identity(self) -> tuple[int, int]:
    """(group_id, sample_index)."""
    return (self.group_id, self.sample_index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedSample:
  """What was sampled; all arrays [T], one value per sampled token, the stop token included."""

  request: GenerationRequest
  tokens: np.ndarray  # int32
  log_probs_t: np.ndarray  # float32, of the distribution that was sampled
  raw_log_probs_t: np.ndarray  # float32, of the model at temperature 1
  version_t: np.ndarray  # int32, weights version that made the token
  finish_reason: FinishReason


def check_request(request: GenerationRequest, model: ModelConfig, engine: EngineConfig) -> None:
  """Raises where a request cannot be served.

  Raises:
    PromptTooLongError: the prompt, or prompt and sample together, do not fit.
    ValueError: a sampling parameter or a token is out of its range.
  """
  tokens, sampling = request.prompt_tokens, request.sampling
  _check_length(len(tokens), sampling.max_tokens, model, engine)
  if tokens.ndim != 1 or tokens.size == 0:
    raise ValueError(f'prompt_tokens must be [P] with P >= 1, got shape {tokens.shape}.')
  if tokens.min() < 0 or tokens.max() >= model.vocab_size:
    raise ValueError(
      f'prompt_tokens must be in [0, {model.vocab_size}), got {tokens.min()}..{tokens.max()}. '
      'Use the tokenizer of this model.'
    )
  _check_sampling(sampling, engine)


def _check_length(length: int, max_tokens: int, model: ModelConfig, engine: EngineConfig) -> None:
  if length > engine.max_prompt_tokens:
    raise PromptTooLongError(
      f'A prompt has {length} tokens, but at most {engine.max_prompt_tokens} are allowed. '
      'Shorten the prompt or raise config.rollout.max_prompt_tokens.'
    )
  if length + max_tokens > model.max_context:
    raise PromptTooLongError(
      f'A prompt of {length} tokens and up to {max_tokens} sampled ones exceed the context of the '
      f'model, {model.max_context}. Shorten the prompt or lower config.rollout.max_tokens.'
    )


def _check_sampling(sampling: SamplingParams, engine: EngineConfig) -> None:
  if not 1 <= sampling.max_tokens <= engine.max_new_tokens:
    raise ValueError(
      f'max_tokens must be in [1, {engine.max_new_tokens}], got {sampling.max_tokens}. '
      'Raise EngineConfig.max_new_tokens.'
    )
  if len(sampling.stop_token_ids) > engine.max_stop_ids:
    raise ValueError(
      f'{len(sampling.stop_token_ids)} stop_token_ids, but at most {engine.max_stop_ids} are '
      'allowed. Raise EngineConfig.max_stop_ids.'
    )
  if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
    raise ValueError(f'temperature must be finite and >= 0, got {sampling.temperature}.')
  if sampling.top_k < 0:
    raise ValueError(f'top_k must be >= 0 (0 is off), got {sampling.top_k}.')
  if not 0 < sampling.top_p <= 1:
    raise ValueError(f'top_p must be in (0, 1] (1 is off), got {sampling.top_p}.')
  if not 0 <= sampling.min_p <= 1:
    raise ValueError(f'min_p must be in [0, 1] (0 is off), got {sampling.min_p}.')
  if any(not text for text in sampling.stop_strings):
    raise ValueError(f'stop_strings must not be empty, got {sampling.stop_strings!r}.')
