"""Idle columns that check proposals: the tokens and log-probs are those of decoding one by one, bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.stats

from rlax_stack.compile_counter import CompileCounter
from rlax_stack.errors import ConfigError
from rlax_stack.models import decoder
from rlax_stack.rollout.drafts import look_up, next_wish, plan_columns, propose
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.prefill import causal_attention
from rlax_stack.rollout.rows import Row, Sampled
from rlax_stack.rollout.self_drafts import draft_ahead
from rlax_stack.rollout.speculation import Columns, Proposals, speculate

_FIELDS = ('tokens', 'log_probs_t', 'raw_log_probs_t', 'version_t', 'finish_reason')


def _check_equal(got, want):
  for name in _FIELDS:
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


@pytest.fixture(scope='module')
def drafting(tiny):
  return Engine(tiny.MODEL, dataclasses.replace(tiny.SIZES, max_draft=3))


def _with_draft(request, tokens):
  return dataclasses.replace(request, draft_tokens=np.asarray(tokens, np.int32))


@pytest.fixture(scope='module')
def plain(tiny):
  """Requests, few enough to leave slots idle, and their samples without speculation."""
  requests = [
    tiny.request(g, 0, temperature=t, top_k=k, max_tokens=20, stop_token_ids=(5, 6, 7))
    for g, (t, k) in enumerate([(0.0, 0), (0.7, 0), (1.0, 9)])
  ]
  return requests, tiny.scheduler().generate_all(requests)


def test_a_draft_that_comes_true_saves_steps_and_changes_no_bit(tiny, drafting, plain):
  requests, samples = plain
  scheduler = tiny.scheduler(of=lambda: drafting)
  drafted = [_with_draft(r, s.tokens) for r, s in zip(requests, samples, strict=True)]
  for got, want in zip(scheduler.generate_all(drafted), samples, strict=True):
    _check_equal(got, want)
  stats = scheduler.stats
  slow = tiny.scheduler()
  slow.generate_all(requests)
  assert stats.decode_steps * 2 <= slow.stats.decode_steps
  assert 0 < stats.accepted_tokens <= stats.drafted_tokens
  assert scheduler.pages_in_use == (0, 0)


@pytest.mark.parametrize('wrong_from', [0, 1, 4, 9])
def test_a_draft_that_fails_costs_nothing(tiny, drafting, plain, wrong_from):
  requests, samples = plain
  random = np.random.default_rng(wrong_from)
  drafted = []
  for request, sample in zip(requests, samples, strict=True):
    draft = sample.tokens.copy()
    draft[wrong_from:] = random.integers(0, 97, len(draft[wrong_from:]))
    drafted.append(_with_draft(request, draft))
  scheduler = tiny.scheduler(of=lambda: drafting)
  for got, want in zip(scheduler.generate_all(drafted), samples, strict=True):
    _check_equal(got, want)


def test_speculation_survives_refills_short_pages_and_moves(tiny, plain):
  """Rows that are fed their own tokens again get them by columns too."""
  short = Engine(tiny.MODEL, dataclasses.replace(tiny.SIZES, max_draft=3, suffix_pages=7))
  requests = [tiny.request(g, i, max_tokens=4 + 5 * i) for g in range(3) for i in range(4)]
  samples = tiny.scheduler().generate_all(requests)
  drafted = [
    _with_draft(r, s.tokens) if r.sample_index % 2 else r
    for r, s in zip(requests, samples, strict=True)
  ]
  scheduler = tiny.scheduler(of=lambda: short)
  for got, want in zip(scheduler.generate_all(drafted), samples, strict=True):
    _check_equal(got, want)
  assert scheduler.stats.replayed_tokens > 0 and scheduler.stats.drafted_tokens > 0
  source, target = tiny.scheduler(of=lambda: short), tiny.scheduler(of=lambda: short)
  source.submit(requests[3])
  source.step()
  target.import_row(source.export_row(*requests[3].identity))
  done = [sample for _ in range(6) for sample in target.step()]
  _check_equal(done[0], dataclasses.replace(samples[3], request=done[0].request))
  assert (
    target.stats.decode_steps < len(samples[3].tokens) - 1
  )  # its own tokens came back several at once


@pytest.mark.parametrize(('kind', 'share'), [('int8', 0.6), ('fp8', 0.4), ('int8_dynamic', 0.6)])
def test_a_quantised_copy_drafts_and_changes_no_bit(tiny, kind, share):
  requests = [tiny.request(g, 0, temperature=t, max_tokens=24) for g, t in enumerate([0.0, 0.7, 1])]
  samples = tiny.scheduler().generate_all(requests)
  sizes = dataclasses.replace(tiny.SIZES, max_draft=3, draft_weights=kind, draft_rows=3)
  engine = Engine(tiny.MODEL, sizes)
  scheduler = tiny.scheduler(of=lambda: engine)
  for got, want in zip(scheduler.generate_all(requests), samples, strict=True):
    _check_equal(got, want)
  stats = scheduler.stats
  slow = tiny.scheduler()
  slow.generate_all(requests)
  assert stats.accepted_tokens >= share * stats.drafted_tokens > 0
  assert stats.decode_steps * 3 <= slow.stats.decode_steps * 2
  assert 0 < stats.copy_steps <= 3 * stats.decode_steps
  # A request's own draft goes before the copy's tokens, and a wrong one is put right.
  mixed = [_with_draft(r, s.tokens) for r, s in zip(requests, samples, strict=True)]
  mixed[1] = _with_draft(requests[1], [*samples[1].tokens[:4], 96, 96])
  for got, want in zip(scheduler.generate_all(mixed), samples, strict=True):
    _check_equal(got, want)
  assert scheduler.pages_in_use == (0, 0)


def test_the_copy_follows_what_is_known(tiny):
  """A copy that always says token + 1, beside proposals for some rows."""
  state = tiny.engine().init_decode_state()
  slots = tiny.SIZES.slots
  on = np.arange(slots) < 3
  rows = state.rows._replace(
    token=np.arange(10, 10 + slots, dtype=np.int32),
    count=np.full(slots, 1, np.int32),
    max_tokens=np.array([9, 9, 3, 9, 9, 9, 9, 9], np.int32),
    active=jax.numpy.asarray(on),
  )
  seen = []

  def decode(ahead):
    seen.append(ahead.rows.position)
    logits = jax.nn.one_hot(ahead.rows.token + 1, 97, axis=0, dtype=np.float32)
    return logits, ahead.suffix_k, ahead.suffix_v, None

  known = np.full((3, slots), -1, np.int32)
  known[0, 1] = 50
  of_row = np.full((slots, 4), slots, np.int32)
  of_row[:3] = [[0, 3, 4, 5], [1, 6, 7, 8], [2, 6, 7, 3]]
  proposals, _, _ = draft_ahead(
    decode,
    state._replace(rows=jax.tree.map(jax.numpy.asarray, rows)),
    jax.numpy.asarray(known),
    jax.numpy.asarray(of_row),
    jax.numpy.int32(3),
  )
  want = np.full((3, slots), -1)
  want[:, 0], want[:, 1] = [11, 12, 13], [50, 51, -1]  # row 1 has columns for two tokens
  want[:, 2] = [13, 14, -1]  # row 2 may sample two more
  np.testing.assert_array_equal(proposals, want)
  assert len(seen) == 1  # one program, whatever the depth


def test_a_copy_that_is_bad_costs_no_bit(tiny, plain):
  """The copy's keys and values never outlive the step, whatever it proposes."""
  requests, samples = plain
  sizes = dataclasses.replace(tiny.SIZES, max_draft=3, draft_weights='int8', kv='same')
  scheduler = tiny.scheduler(of=lambda: Engine(tiny.MODEL, sizes))
  good = scheduler.prepare(tiny.params())
  other = jax.tree.map(
    lambda x: x + 0.3 * jax.numpy.sin(jax.numpy.arange(x.size).reshape(x.shape)).astype(x.dtype),
    tiny.params(),
  )
  bad = scheduler.prepare(other)
  scheduler.swap_prepared(good._replace(draft=bad.draft), 1)
  for got, want in zip(scheduler.generate_all(requests[:2]), samples[:2], strict=True):
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.log_probs_t, want.log_probs_t)
  assert scheduler.stats.copy_steps > 0
  assert scheduler.stats.accepted_tokens < 0.5 * scheduler.stats.drafted_tokens


def test_the_copy_drafts_only_while_few_rows_decode(tiny):
  sizes = dataclasses.replace(tiny.SIZES, max_draft=3, draft_weights='int8')
  assert sizes.draft_rows == 2
  scheduler = tiny.scheduler(of=lambda: Engine(tiny.MODEL, sizes))
  for index in range(5):
    scheduler.submit(tiny.request(1, index, max_tokens=8 if index else 24))
  for _ in range(2):
    scheduler.step()
  assert scheduler.num_running == 1 and scheduler.stats.copy_steps == 0
  scheduler.step()
  assert scheduler.stats.copy_steps > 0


def test_a_copy_needs_something_to_save():
  with pytest.raises(ConfigError, match='draft_weights=int8 needs max_draft above 0'):
    EngineConfig(draft_weights='int8')
  with pytest.raises(ConfigError, match='got max_draft=2 and weights=int8'):
    EngineConfig(draft_weights='int8', max_draft=2, weights='int8')
  with pytest.raises(ConfigError, match="draft_weights must be one of none, .*got 'int3'"):
    EngineConfig(draft_weights='int3', max_draft=2)


def test_repeating_text_is_looked_up(tiny, drafting):
  """Greedy decoding of a tiny model falls into a loop: lookup proposes it."""
  request = tiny.request(2, 0, temperature=0.0, max_tokens=24)
  want = tiny.scheduler().generate_all([request])[0]
  scheduler = tiny.scheduler(of=lambda: drafting)
  _check_equal(scheduler.generate_all([request])[0], want)


@pytest.mark.parametrize('kind', ['none', 'int8'])
def test_nothing_compiles_once_warm(tiny, drafting, plain, kind):
  requests, samples = plain
  sizes = dataclasses.replace(drafting.engine_config, draft_weights=kind)
  scheduler = tiny.scheduler(of=lambda: Engine(tiny.MODEL, sizes))
  scheduler.warm_up()
  with CompileCounter() as counter:
    scheduler.generate_all([_with_draft(requests[1], samples[1].tokens), requests[2]])
    assert counter.count.names == ()


@pytest.mark.parametrize('kind', ['none', 'int8'])
def test_samples_are_distributed_as_the_model_says(tiny, kind):
  """Thousands of samples over a vocabulary of four, by a draft or a quantised copy: chi-square of triples of tokens."""
  model = dataclasses.replace(tiny.MODEL, vocab_size=4)
  params = jax.tree.map(
    lambda x: x if x.ndim < 2 else x * 2, decoder.init_params(model, jax.random.key(0))
  )
  sizes = EngineConfig(
    slots=48,
    max_prompt_tokens=8,
    max_new_tokens=3,
    chunk_steps=2,
    max_draft=2,
    page_size=16,
    draft_weights=kind,
    draft_rows=16,
  )
  engine = Engine(model, sizes)
  scheduler = tiny.scheduler(of=lambda: engine)
  scheduler.swap_params(params, 1)
  prompt = np.array([1, 2, 3], np.int32)
  count = np.zeros((4, 4, 4))
  for block in range(250):
    requests = [tiny.request(block, i, tokens=prompt, max_tokens=3) for i in range(16)]
    if kind == 'none':
      requests = [_with_draft(request, [0, 2, 1]) for request in requests]
    for sample in scheduler.generate_all(requests):
      count[tuple(sample.tokens)] += 1
  assert scheduler.stats.accepted_tokens > 100
  triples = np.stack(np.unravel_index(np.arange(64), (4, 4, 4)), axis=1)
  tokens = np.concatenate([np.tile(prompt, (64, 1)), triples], axis=1).astype(np.int32)
  positions = np.tile(np.arange(6, dtype=np.int32), (64, 1))
  hidden = decoder.hidden_states(params, model, tokens, positions, causal_attention)
  log_probs = jax.nn.log_softmax(hidden[:, 2:-1] @ decoder.lm_head(params, model).T)
  chosen = np.take_along_axis(np.asarray(log_probs, np.float64), triples[:, :, None], axis=2)
  expected = np.exp(chosen.sum((1, 2))) * count.sum()
  observed, rare = count.reshape(-1), expected < 5
  if rare.any():
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
  assert len(expected) > 20
  assert scipy.stats.chisquare(observed, expected / expected.sum() * 4000).pvalue > 1e-3


def test_what_is_proposed(tiny):
  history = np.array([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], np.int32)
  np.testing.assert_array_equal(look_up(history, 3), [4, 8, 1])  # the latest place
  np.testing.assert_array_equal(look_up(np.array([1, 2, 3, 9, 1, 2, 3]), 2), [9, 1])  # the longest
  assert look_up(np.array([1, 2, 3]), 2).size == 0
  request = _with_draft(tiny.request(0, 0, tokens=np.array([7, 8, 9], np.int32)), [1, 2, 3, 4])
  floats = np.zeros(2, np.float32)

  def row(*tokens):
    return Row(request, 0, parts=[Sampled(np.array(tokens, np.int32), floats, floats, floats)])

  np.testing.assert_array_equal(propose(row(1, 2), 5), [3, 4])  # it follows its draft
  np.testing.assert_array_equal(propose(row(7, 8), 2), [9, 7])  # it does not: lookup
  assert propose(row(1, 9), 2).size == 0


def test_idle_columns_go_round():
  columns = plan_columns({1: 2, 4: 5}, slots=6, width=4)
  assert isinstance(columns, Columns)
  np.testing.assert_array_equal(columns.used, True)
  np.testing.assert_array_equal(columns.of_row[:, 0], [6, 1, 6, 6, 4, 6])
  assert columns.of_row[1, 1:].tolist() == [5, 2, 6] and columns.of_row[4, 1:].tolist() == [3, 0, 6]
  np.testing.assert_array_equal(columns.owner[[5, 2, 3, 0]], [1, 1, 4, 4])
  np.testing.assert_array_equal(columns.offset[[5, 2, 3, 0]], [1, 2, 1, 2])
  full = plan_columns({0: 3, 1: 3}, slots=2, width=4)
  assert full.of_row.tolist() == [[0, 2, 2, 2], [1, 2, 2, 2]]


def test_the_wish_follows_what_stands():
  assert next_wish(4, 40, 40, most=7) == 7
  assert next_wish(2, 10, 9, most=7) == 4
  assert next_wish(4, 40, 20, most=7) == 4
  assert next_wish(4, 40, 2, most=7) == 3
  assert next_wish(1, 40, 0, most=7) == 0
  assert next_wish(3, 0, 0, most=7) == 3


def test_speculation_and_controls_do_not_mix():
  with pytest.raises(ConfigError, match='max_draft=2 does not go with logit_controls'):
    EngineConfig(max_draft=2, logit_controls=True)
  assert callable(speculate) and Proposals._fields == ('forced', 'drafts')
