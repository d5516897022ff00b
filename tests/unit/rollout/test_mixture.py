"""Sampling from a mixture of experts: log-probs of the plain decoder, and samples that depend on nobody."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.models import decoder
from rlax_stack.rollout.engine import Engine, check_mixture
from rlax_stack.rollout.prefill import causal_attention
from rlax_stack.rollout.scheduler import Scheduler


@pytest.fixture(scope='module')
def config(tiny):
  return dataclasses.replace(
    tiny.MODEL, num_experts=6, experts_per_token=2, moe_intermediate_size=24, qk_norm=True
  )


@pytest.fixture(scope='module')
def params(config):
  random = decoder.init_params(config, jax.random.key(0))
  return jax.tree.map(lambda x: x if x.ndim < 2 else x * 3, random)


@pytest.fixture(scope='module')
def engine(config, tiny):
  return Engine(config, tiny.SIZES)


@pytest.fixture
def scheduler(engine, params):
  made = Scheduler(engine, run_seed=0)
  made.swap_params(params, 0)
  return made


def test_log_probs_equal_the_plain_decoder(tiny, scheduler, config, params):
  @jax.jit
  def plain(tokens):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    hidden = decoder.hidden_states(params, config, tokens[None], positions, causal_attention)
    return jax.nn.log_softmax(hidden[0] @ decoder.lm_head(params, config).T)

  for sample in scheduler.generate_all([tiny.request(g, i) for g in range(5) for i in range(3)]):
    start = len(sample.request.prompt_tokens)
    tokens = np.concatenate([sample.request.prompt_tokens, sample.tokens])
    padded = np.zeros(64, np.int32)
    padded[: len(tokens)] = tokens
    scores = np.asarray(plain(padded))[start - 1 : len(tokens) - 1]
    want = scores[np.arange(len(sample.tokens)), sample.tokens]
    np.testing.assert_allclose(sample.raw_log_probs_t, want, atol=1e-4)


def test_samples_do_not_depend_on_order_slots_or_neighbours(tiny, scheduler, engine, params):
  requests = [tiny.request(g, i, temperature=0.5 + 0.25 * i) for g in range(6) for i in range(4)]
  first = scheduler.generate_all(requests)
  order = np.random.default_rng(1).permutation(len(requests))
  second = scheduler.generate_all([requests[i] for i in order])
  fresh = Scheduler(engine, run_seed=0)
  fresh.swap_params(params, 0)
  alone = fresh.generate_all([requests[5]])[0]
  for again, i in [(alone, 5), *((second[k], i) for k, i in enumerate(order))]:
    for name in ('tokens', 'log_probs_t', 'raw_log_probs_t', 'version_t'):
      np.testing.assert_array_equal(getattr(again, name), getattr(first[i], name))


def test_quantised_experts_are_refused_and_quantised_keys_are_not(tiny, config):
  for change in ({'weights': 'int8'}, {'draft_weights': 'fp8', 'max_draft': 2}):
    name = next(iter(change))
    with pytest.raises(ConfigError, match=f'config.rollout.{name}=.*6. Set it to'):
      Engine(config, dataclasses.replace(tiny.SIZES, **change))
  check_mixture(config, dataclasses.replace(tiny.SIZES, kv='int8'))
  check_mixture(tiny.MODEL, dataclasses.replace(tiny.SIZES, weights='int8'))
