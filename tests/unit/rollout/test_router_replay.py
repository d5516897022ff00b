"""The experts that tokens of a mixture go through, as the engine records them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.models import decoder
from rlax_stack.rollout.engine import Engine, check_mixture
from rlax_stack.rollout.prefill import causal_attention
from rlax_stack.rollout.prefix_table import Piece
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.trajectory import Span, assemble, given_span, make_trajectory
from rlax_stack.types import FinishReason, Source


@pytest.fixture(scope='module')
def config(tiny):
  return dataclasses.replace(
    tiny.MODEL, num_experts=6, experts_per_token=2, moe_intermediate_size=24
  )


@pytest.fixture(scope='module')
def weights(config):
  """Function (seed) -> weights."""

  @functools.cache
  def make(seed):
    random = decoder.init_params(config, jax.random.key(seed))
    return jax.tree.map(lambda x: x if x.ndim < 2 else x * 3, random)

  return make


@pytest.fixture(scope='module')
def engine(config, tiny):
  """Function (EngineConfig fields) -> an engine that records experts; prompts above 16 tokens come in pieces."""

  @functools.cache
  def make(**fields):
    sizes = {'record_experts': True, 'prefill_chunk': 16, **fields}
    return Engine(config, dataclasses.replace(tiny.SIZES, **sizes))

  return make


@pytest.fixture(scope='module')
def scheduler(engine, weights):
  def make(swap_mode='in_place', **fields):
    made = Scheduler(engine(**fields), run_seed=0, swap_mode=swap_mode)
    made.swap_params(weights(0), 0)
    return made

  return make


@pytest.fixture(scope='module')
def routes(config):
  """Function (weights, tokens) -> experts [T, L, k] by the plain decoder, compiled once."""

  @jax.jit
  def run(params, tokens):
    _, (_, experts) = decoder.hidden_states_and_aux(
      params,
      config,
      tokens[None],
      jnp.arange(tokens.shape[0], dtype=jnp.int32)[None],
      lambda q, k, v: (causal_attention(q, k, v), None),
      observe=lambda routing: routing.experts[0],
    )
    return experts.swapaxes(0, 1)

  def make(params, tokens):
    padded = np.zeros(64, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(run(params, padded))[: len(tokens)]

  return make


@pytest.fixture(scope='module')
def requests(tiny):
  """Prompts of 5 to 24 tokens, two samples each."""
  return [tiny.request(g, i, max_tokens=17) for g in (0, 13, 19) for i in range(2)]


@pytest.fixture(scope='module')
def samples(scheduler, requests):
  return scheduler().generate_all(requests)


def _tokens(sample):
  return np.concatenate([sample.request.prompt_tokens, sample.tokens])


def test_samples_carry_the_experts_of_every_token_but_the_last(samples, weights, routes, config):
  for sample in samples:
    want = routes(weights(0), _tokens(sample))
    assert sample.experts_t.dtype == np.int16
    assert sample.experts_t.shape == (len(want), config.num_layers, 2)
    np.testing.assert_array_equal(sample.experts_t[:-1], want[:-1])
    assert (sample.experts_t[-1] == -1).all()
    np.testing.assert_array_equal(
      make_trajectory(sample, prompt_id='p').experts_t, sample.experts_t
    )


def test_recording_changes_no_sample_and_is_off_by_itself(config, tiny, weights, requests, samples):
  plain = Scheduler(Engine(config, dataclasses.replace(tiny.SIZES, prefill_chunk=16)), run_seed=0)
  plain.swap_params(weights(0), 0)
  for got, want in zip(plain.generate_all(requests[:2]), samples, strict=False):
    assert got.experts_t is None and make_trajectory(got, prompt_id='p').experts_t is None
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.log_probs_t, want.log_probs_t)


def test_rows_set_back_and_columns_that_check_drafts_record_the_same(scheduler, requests, samples):
  short = scheduler(suffix_pages=7, max_draft=3)
  drafted = [
    dataclasses.replace(r, draft_tokens=s.tokens) for r, s in zip(requests, samples, strict=True)
  ]
  for got, want in zip(short.generate_all(drafted), samples, strict=True):
    np.testing.assert_array_equal(got.experts_t, want.experts_t)
  assert short.stats.replayed_tokens > 0 and short.stats.accepted_tokens > 0


def test_half_done_samples_move_with_their_experts(scheduler, requests, samples, tiny):
  source, target = scheduler(), scheduler()
  source.submit(requests[4])
  source.step()
  partial = source.export_row(*requests[4].identity)
  assert 0 < len(partial.experts_before_t) == len(partial.tokens) < 17
  for change in ({'experts_before_t': None}, {'prompt_experts': partial.prompt_experts[1:]}):
    with pytest.raises(ValueError, match=f'{next(iter(change))} must be .*same model'):
      target.import_row(dataclasses.replace(partial, **change))
  target.import_row(partial)
  (done,) = _finish(target)
  np.testing.assert_array_equal(done.experts_t, samples[4].experts_t)


def test_under_new_weights_what_was_drawn_keeps_its_experts(scheduler, weights, requests, routes):
  retracting = scheduler(swap_mode='retract')
  retracting.submit(requests[4])
  retracting.step()
  count = len(retracting.progress()[requests[4].identity].tokens)
  retracting.swap_params(weights(1), 1)
  (done,) = _finish(retracting)
  old, new = (routes(weights(seed), _tokens(done)) for seed in (0, 1))
  # The last token drawn under the old weights is the first to go through the new ones.
  first = len(requests[4].prompt_tokens) + count - 1
  np.testing.assert_array_equal(done.experts_t[:first], old[:first])
  np.testing.assert_array_equal(done.experts_t[first:-1], new[first:-1])
  assert not np.array_equal(old[:first], new[:first])


def _finish(scheduler):
  done = []
  while scheduler.has_work:
    done += scheduler.step()
  return done


def test_dense_models_record_nothing(tiny, config):
  with pytest.raises(ConfigError, match=r'router_replay=True .*dense. Set it to False'):
    check_mixture(tiny.MODEL, dataclasses.replace(tiny.SIZES, record_experts=True))
  check_mixture(config, dataclasses.replace(tiny.SIZES, record_experts=True))


def test_a_prefix_in_pieces_has_the_experts_of_all():
  prefix = np.arange(5, dtype=np.int32)
  shared = {'prefix': prefix, 'pages': (), 'index': None, 'key': (0, b'')}
  first = Piece(start=0, parent=None, **shared)
  last = Piece(start=3, parent=first, **shared)
  assert last.all_experts is None
  first.experts, last.experts = np.zeros((3, 2, 1), np.int16), np.ones((2, 2, 1), np.int16)
  assert last.all_experts[:, 0, 0].tolist() == [0, 0, 0, 1, 1]


def _span(*experts, count, new_context=False):
  none = np.zeros(count, np.float32)
  recorded = np.array(experts, np.int16).reshape(-1, 1, 1)
  ids = np.arange(count, dtype=np.int32)
  version = np.zeros(count, np.int32)
  fields = (ids, none, none, version, Source.POLICY, True, new_context)
  return Span(*fields, experts_t=recorded)


def test_experts_of_spans_lie_where_their_tokens_are():
  """A prompt of two, a sample of two, two tokens given, and a sample of one after them."""
  spans = [
    _span(0, 1, 2, -1, count=2),
    given_span(np.zeros(2, np.int32), source=Source.ENV),
    _span(9, 9, 9, 3, 4, 5, -1, count=1),
  ]
  identity = {'group_id': 0, 'sample_index': 0, 'prompt_id': 'p'}
  made = assemble(np.zeros(2, np.int32), spans, finish_reason=FinishReason.STOP, **identity)
  assert made.experts_t[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, -1]
  # The context is set back to the prompt: the tokens given are the first after it.
  spans[1] = given_span(np.zeros(2, np.int32), source=Source.GUIDE, new_context=True)
  spans[2] = _span(9, 9, 6, 7, -1, count=1)
  made = assemble(np.zeros(2, np.int32), spans, finish_reason=FinishReason.STOP, **identity)
  assert made.experts_t[:, 0, 0].tolist() == [0, 1, 2, -1, 6, 7, -1]
  assert spans[0].first(1, trained=False).experts_t[:, 0, 0].tolist() == [0, 1, 2]
