"""A tiny random model, an engine and a slow reference for the tests of rollout/."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.prefill import causal_attention
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.types import SamplingParams

MODEL = ModelConfig(
  vocab_size=97,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  max_context=128,
)
SIZES = EngineConfig(
  slots=8,
  max_prompt_tokens=32,
  max_new_tokens=24,
  chunk_steps=6,
  page_size=16,
  suffix_page_size=8,
  rows_per_block=4,
  prefill_tokens=64,
)


@functools.cache
def engine() -> Engine:
  return Engine(MODEL, SIZES)


@functools.cache
def engine_with_tops() -> Engine:
  return Engine(MODEL, dataclasses.replace(SIZES, max_top_log_probs=20))


@functools.cache
def params(seed: int = 0):
  # Sharper than at initialisation, so that a wrong key or position changes the tokens.
  random = decoder.init_params(MODEL, jax.random.key(seed))
  return jax.tree.map(lambda x: x if x.ndim < 2 else x * 3, random)


def scheduler(
  *, run_seed: int = 0, decode_text=None, version: int = 0, of=engine, **options
) -> Scheduler:
  made = Scheduler(of(), run_seed=run_seed, decode_text=decode_text, **options)
  made.swap_params(params(), version)
  return made


def prompt(seed: int, length: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, MODEL.vocab_size, length).astype(np.int32)


def request(group: int = 0, index: int = 0, *, tokens=None, **sampling) -> GenerationRequest:
  tokens = prompt(group, 5 + group % 20) if tokens is None else tokens
  sampling = {'max_tokens': 12, **sampling}
  return GenerationRequest(
    group_id=group,
    sample_index=index,
    prompt_tokens=tokens,
    sampling=SamplingParams(**sampling),
  )


@jax.jit
def _logits(params, tokens):
  positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
  hidden = decoder.hidden_states(params, MODEL, tokens[None], positions, causal_attention)
  return hidden[0] @ decoder.lm_head(params, MODEL).T


def full_logits(tokens: np.ndarray, weights=None) -> np.ndarray:
  """Logits [T, V] of a whole sequence by the plain decoder; padded to one length, so compiled once."""
  padded = np.zeros(128, np.int32)
  padded[: len(tokens)] = tokens
  logits = _logits(params() if weights is None else weights, padded)
  return np.asarray(logits, np.float64)[: len(tokens)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def sampled_log_probs(sample, weights=None) -> np.ndarray:
  """Model log-probs at temperature 1 of a finished sample's tokens, by the plain decoder."""
  prompt_tokens = sample.request.prompt_tokens
  tokens = np.concatenate([prompt_tokens, sample.tokens])
  logits = log_softmax(full_logits(tokens, weights))[len(prompt_tokens) - 1 : -1]
  return logits[np.arange(len(sample.tokens)), sample.tokens]


@pytest.fixture(scope='session')
def tiny():
  """The functions of this file."""
  return types.SimpleNamespace(
    MODEL=MODEL,
    SIZES=SIZES,
    engine=engine,
    engine_with_tops=engine_with_tops,
    params=params,
    scheduler=scheduler,
    prompt=prompt,
    request=request,
    full_logits=full_logits,
    log_softmax=log_softmax,
    sampled_log_probs=sampled_log_probs,
  )
