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
  under another identity. `policy` names who draws it where a worker has several (joint_scheduler.py), '' the first.
  """

  group_id: int
  sample_index: int
  prompt_tokens: np.ndarray  # int32 [P], P >= 1
  sampling: SamplingParams
  draft_tokens: np.ndarray | None = (
    None  # int32 [D], what the sample may turn out to be; changes no token
  )
  rng_group_id: int | None = None
  attention_distance: int = 0  # above 0 the sample comes with attention_t of tokens so far apart
  policy: str = ''

  @property
  def identity(self) -> tuple[int, int]:
    """(group_id, sample_index)."""
    return (self.group_id, self.sample_index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedSample:
  """What was sampled; all arrays [T], one value per sampled token, the stop token included.

  `attention_t` is of the weights in use when the sample ended, and absent where it was cancelled.
  """

  request: GenerationRequest
  tokens: np.ndarray  # int32
  log_probs_t: np.ndarray  # float32, of the distribution that was sampled
  raw_log_probs_t: np.ndarray  # float32, of the model at temperature 1
  version_t: np.ndarray  # int32, weights version that made the token
  finish_reason: FinishReason
  top_ids_t: np.ndarray | None = None  # int32 [T, sampling.top_log_probs], the likeliest tokens
  top_log_probs_t: np.ndarray | None = None  # float32 like it, of the model at temperature 1
  attention_t: np.ndarray | None = None  # float32, got from tokens attention_distance or more later
  kept_ids_t: np.ndarray | None = None  # int32 [T, kept_tokens], see types.Trajectory
  # int16 [P + T, L, k], experts that each token of prompt and sample went through, -1 for the last
  experts_t: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialSample:
  """A half-done sample that moves: its tokens so far, and how its KV came to be.

  Under weights `kv_version` another engine of the same sizes goes on to the same tokens and log-probs, bit for bit;
  under others it computes the KV of all tokens anew.
  """

  request: GenerationRequest  # with a seed
  tokens: np.ndarray  # int32 [T]
  log_probs_t: np.ndarray  # float32 [T]
  raw_log_probs_t: np.ndarray  # float32 [T]
  version_t: np.ndarray  # int32 [T]
  top_ids_t: np.ndarray | None = None  # int32 [T, K]
  top_log_probs_t: np.ndarray | None = None  # float32 [T, K]
  kept_ids_t: np.ndarray | None = None  # int32 [T, kept_tokens]
  experts_before_t: np.ndarray | None = None  # int16 [T, L, k], of the token before each
  prompt_experts: np.ndarray | None = None  # int16 [P, L, k], None before the first token
  recomputed: int = 0  # tokens that were prefilled together with the prompt
  kv_version: int = -1  # weights that made the KV, -1 where several did


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptScore:
  """A text and the model's log-probs of its tokens, each given those before it, at temperature 1.

  Nothing comes before the first token: its log-probs are NaN, its top ids -1 and its rank 0.
  """

  tokens: np.ndarray  # int32 [T]
  log_probs_t: np.ndarray  # float32 [T]
  version: int  # of the weights
  top_ids_t: np.ndarray | None = None  # int32 [T, min(top, V)], the likeliest, where asked for
  top_log_probs_t: np.ndarray | None = None  # float32 like it
  rank_t: np.ndarray | None = None  # int32 [T], 1 and the number of likelier tokens, with top_ids_t


def check_text(tokens: np.ndarray, top: int, model: ModelConfig, engine: EngineConfig) -> None:
  """Raises where a text cannot be scored with its `top` likeliest tokens.

  Raises:
    PromptTooLongError: it does not fit.
    ValueError: it is empty or of another vocabulary, or `top` is out of its range.
  """
  longest = min(engine.max_text_tokens, model.max_context)
  if len(tokens) > longest:
    raise PromptTooLongError(
      f'A text has {len(tokens)} tokens, but at most {longest} can be scored: a prompt and a sample within the context '
      f'of {model.max_context}. Shorten the text or raise config.rollout.max_prompt_tokens.'
    )
  _check_tokens(tokens, 'tokens', model)
  if not 0 <= top <= engine.max_top_log_probs:
    raise ValueError(
      f'top must be in [0, {engine.max_top_log_probs}], got {top}. Raise EngineConfig.max_top_log_probs.'
    )


def _check_tokens(tokens: np.ndarray, name: str, model: ModelConfig) -> None:
  if tokens.ndim != 1 or tokens.size == 0:
    raise ValueError(f'{name} must be [P] with P >= 1, got shape {tokens.shape}.')
  if tokens.min() < 0 or tokens.max() >= model.vocab_size:
    raise ValueError(
      f'{name} must be in [0, {model.vocab_size}), got {tokens.min()}..{tokens.max()}. '
      'Use the tokenizer of this model.'
    )


def check_request(request: GenerationRequest, model: ModelConfig, engine: EngineConfig) -> None:
  """Raises where a request cannot be served.

  Raises:
    PromptTooLongError: the prompt, or prompt and sample together, do not fit.
    ValueError: a sampling parameter or a token is out of its range.
  """
  tokens, sampling = request.prompt_tokens, request.sampling
  _check_length(len(tokens), sampling.max_tokens, model, engine)
  _check_tokens(tokens, 'prompt_tokens', model)
  if request.attention_distance < 0:
    raise ValueError(
      f'attention_distance must be at least 0 (0 is off), got {request.attention_distance}.'
    )
  _check_sampling(sampling, engine)
  _check_controls(sampling, model, engine)


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
  if not 0 <= sampling.top_log_probs <= engine.max_top_log_probs:
    raise ValueError(
      f'top_log_probs must be in [0, {engine.max_top_log_probs}], got {sampling.top_log_probs}. '
      'Raise EngineConfig.max_top_log_probs.'
    )


def _check_controls(sampling: SamplingParams, model: ModelConfig, engine: EngineConfig) -> None:
  """Of what changes logits."""
  if not 0 <= sampling.min_tokens <= sampling.max_tokens:
    raise ValueError(
      f'min_tokens must be in [0, max_tokens={sampling.max_tokens}], got {sampling.min_tokens}.'
    )
  if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
    raise ValueError(
      f'repetition_penalty must be finite and > 0 (1 is off), got {sampling.repetition_penalty}.'
    )
  for name in ('presence_penalty', 'frequency_penalty'):
    if not -2 <= getattr(sampling, name) <= 2:
      raise ValueError(f'{name} must be in [-2, 2] (0 is off), got {getattr(sampling, name)}.')
  for token, bias in sampling.logit_bias:
    if not 0 <= token < model.vocab_size or not math.isfinite(bias):
      raise ValueError(
        f'logit_bias must map tokens in [0, {model.vocab_size}) to finite numbers, got {token}: {bias}.'
      )
  if engine.logit_controls and len(sampling.logit_bias) > engine.max_logit_bias:
    raise ValueError(
      f'{len(sampling.logit_bias)} tokens in logit_bias, but at most {engine.max_logit_bias} are allowed. '
      'Raise EngineConfig.max_logit_bias.'
    )
  if changes_logits(sampling) and not engine.logit_controls:
    raise ValueError(
      'this engine was built without logit_controls, so min_tokens, penalties and logit_bias are off. '
      'Set EngineConfig.logit_controls.'
    )


def changes_logits(sampling: SamplingParams) -> bool:
  """Whether a request needs an engine with logit_controls."""
  penalties = (sampling.presence_penalty, sampling.frequency_penalty)
  return (
    sampling.repetition_penalty != 1
    or any(penalties)
    or bool(sampling.logit_bias)
    or sampling.min_tokens > 0
  )


def check_partial(partial: PartialSample, model: ModelConfig, engine: EngineConfig) -> None:
  """Raises ValueError where a half-done sample cannot go on."""
  tokens, most = partial.tokens, partial.request.sampling.max_tokens
  if not len(tokens) < most:
    raise ValueError(f'{len(tokens)} tokens of at most {most} are sampled: nothing is left to do.')
  if len(tokens) and not (0 <= tokens.min() and tokens.max() < model.vocab_size):
    raise ValueError(
      f'tokens must be in [0, {model.vocab_size}), got {tokens.min()}..{tokens.max()}. '
      'The sample is of another model.'
    )
  if not 0 <= partial.recomputed <= len(tokens):
    raise ValueError(f'recomputed must be in [0, {len(tokens)}], got {partial.recomputed}.')
  lengths = {len(partial.log_probs_t), len(partial.raw_log_probs_t), len(partial.version_t)}
  if lengths != {len(tokens)}:
    raise ValueError(f'{len(tokens)} tokens, but log-probs and versions of {sorted(lengths)}.')
  kept = None if partial.kept_ids_t is None else partial.kept_ids_t.shape
  wanted = (len(tokens), engine.kept_tokens) if engine.kept_tokens else None
  if len(tokens) and kept != wanted:
    raise ValueError(
      f'kept_ids_t must be {wanted or "None"} for {len(tokens)} tokens and EngineConfig.kept_tokens='
      f'{engine.kept_tokens}, got {kept}. Move samples between engines of the same kept_tokens.'
    )
  _check_experts(partial, model, engine)


def _check_experts(partial: PartialSample, model: ModelConfig, engine: EngineConfig) -> None:
  """Of those that are recorded."""
  if not len(partial.tokens):
    return
  layer = (model.num_layers, model.experts_per_token)
  counts = {
    'prompt_experts': len(partial.request.prompt_tokens),
    'experts_before_t': len(partial.tokens),
  }
  for name, count in counts.items():
    found = getattr(partial, name)
    shape = None if found is None else found.shape
    wanted = (count, *layer) if engine.record_experts else None
    if shape != wanted:
      raise ValueError(
        f'{name} must be {wanted or "None"} with EngineConfig.record_experts={engine.record_experts}, got {shape}. '
        'Move samples between engines of the same model and record_experts.'
      )
