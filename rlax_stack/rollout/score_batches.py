"""Texts to batches of one padded length each, and what the engine says of them back to one result a text or sample.

Not for when texts are scored (scheduler.py). A result does not depend on which texts share a batch, but for rounding.
"""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.prompt_scoring import Scores, padded_length
from rlax_stack.rollout.requests import FinishedSample, PromptScore
from rlax_stack.rollout.serving import ServingParams


def score_texts(
  engine: Engine,
  params: ServingParams,
  sequences: Sequence[np.ndarray],
  *,
  top: int,
  version: int,
) -> list[PromptScore]:
  """Scores of texts, int32 [T] each and checked, in order.

  Args:
    engine: compiled programs.
    params: of the model.
    sequences: the texts.
    top: likeliest tokens per position; 0 gives no ranks either.
    version: of `params`.
  """
  sizes, found = engine.engine_config, {}
  by_length = collections.defaultdict(list)
  for index, tokens in enumerate(sequences):
    by_length[padded_length(sizes, len(tokens))].append(index)
  for length, members in by_length.items():
    batch = sizes.prefill_batches(length)[-1]
    for start in range(0, len(members), batch):
      chosen = members[start : start + batch]
      padded, lengths = np.zeros((batch, length), np.int32), np.ones(batch, np.int32)
      for row, index in enumerate(chosen):
        lengths[row] = len(sequences[index])
        padded[row, : lengths[row]] = sequences[index]
      scores = jax.device_get(engine.score(params, padded, lengths, tops=top > 0))
      for row, index in enumerate(chosen):
        found[index] = _of_text(sequences[index], row, scores, top, version)
  return [found[index] for index in range(len(sequences))]


def _of_text(tokens: np.ndarray, row: int, scores: Scores, top: int, version: int) -> PromptScore:
  count = len(tokens)
  log_probs = np.array(scores.log_probs[row, :count])
  log_probs[0] = np.nan
  if scores.top_ids is None or scores.top_log_probs is None or scores.ranks is None:
    return PromptScore(tokens=tokens, log_probs_t=log_probs, version=version)
  ids = np.array(scores.top_ids[row, :count, :top])
  values = np.array(scores.top_log_probs[row, :count, :top])
  ids[0], values[0] = -1, np.nan
  return PromptScore(
    tokens=tokens,
    log_probs_t=log_probs,
    version=version,
    top_ids_t=ids,
    top_log_probs_t=values,
    rank_t=np.array(scores.ranks[row, :count]),
  )


def attention_in_text(
  engine: Engine, params: ServingParams, tokens: np.ndarray, distance: int
) -> np.ndarray:
  """Attention that each token of a checked text, int32 [T], gets from `distance` or more after it, float32 [T]."""
  length = padded_length(engine.engine_config, len(tokens))
  padded, lengths = np.zeros((1, length), np.int32), np.array([len(tokens)], np.int32)
  padded[0, : len(tokens)] = tokens
  return np.array(engine.attention_received(params, padded, lengths, distance)[0, : len(tokens)])


def with_attention(engine: Engine, params: ServingParams, sample: FinishedSample) -> FinishedSample:
  """The sample with its attention_t where its request asks for it."""
  request = sample.request
  if not request.attention_distance:
    return sample
  tokens = np.concatenate([np.asarray(request.prompt_tokens, np.int32), sample.tokens])
  found = attention_in_text(engine, params, tokens, request.attention_distance)
  return dataclasses.replace(sample, attention_t=found[len(request.prompt_tokens) :])
