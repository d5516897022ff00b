"""Prompts scored by the endpoint, as evaluation harnesses ask for them, through OpenAI's own client on loopback."""

import asyncio
import concurrent.futures

import jax.numpy as jnp
import numpy as np
import openai
import pytest

from rlax_stack.errors import PromptTooLongError
from rlax_stack.models import decoder
from rlax_stack.models.load import load_model
from rlax_stack.rollout.prefill import causal_attention
from rlax_stack.types import FinishReason, SamplingParams

PROMPT = 'the sky : one two <end> cat'


@pytest.fixture(scope='module')
def client(server):
  with openai.OpenAI(base_url=server.url, api_key='unused', max_retries=0, timeout=60) as made:
    yield made


@pytest.fixture(scope='module')
def model(long_model):
  return load_model(long_model)


def complete(client, **fields):
  extra = {'stop_token_ids': [], **fields.pop('extra_body', {})}
  fields = {'model': 'toy', 'prompt': PROMPT, 'max_tokens': 6, 'seed': 1, **fields}
  return client.completions.create(**fields, extra_body=extra)


def log_probs(model, tokens):
  """float64 [T - 1, V] of the distributions of tokens 1, 2, ..., by the plain decoder."""
  row = np.asarray(tokens, np.int32)[None]
  positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
  hidden = decoder.hidden_states(model.params, model.config, row, positions, causal_attention)
  logits = np.asarray(hidden[0] @ decoder.lm_head(model.params, model.config).T, np.float64)[:-1]
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize('max_tokens', [0, 6])
def test_echo_gives_the_log_probs_of_the_prompt_first(client, model, max_tokens):
  answer = complete(client, echo=True, logprobs=3, max_tokens=max_tokens)
  choice, found = answer.choices[0], answer.choices[0].logprobs
  prompt = model.tokenizer.encode(PROMPT).tolist()
  tokens = prompt + choice.token_ids
  assert choice.prompt_token_ids == prompt and len(choice.token_ids) == max_tokens
  assert choice.text == PROMPT + model.tokenizer.decode(choice.token_ids)
  assert [model.tokenizer.piece_to_id(text) for text in found.tokens] == tokens
  want = log_probs(model, tokens)
  assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
  chosen = want[np.arange(len(want)), tokens[1:]]
  np.testing.assert_allclose(found.token_logprobs[1:], chosen, atol=1e-4)
  for row, top in zip(want, found.top_logprobs[1:], strict=True):
    likeliest = np.argsort(-row)[:3]
    assert [model.tokenizer.piece_to_id(text) for text in top] == likeliest.tolist()
    np.testing.assert_allclose(list(top.values()), row[likeliest], atol=1e-4)
  lengths = [len(text) for text in found.tokens]
  assert found.text_offset == np.cumsum([0, *lengths[:-1]]).tolist()
  assert choice.finish_reason == 'length' and choice.prompt_version == 0
  assert answer.usage.prompt_tokens == 7 and answer.usage.completion_tokens == max_tokens
  plain = complete(client, logprobs=3, max_tokens=max(max_tokens, 1)).choices[0]
  assert choice.token_ids == plain.token_ids[:max_tokens]
  if max_tokens:
    assert found.token_logprobs[7:] == plain.logprobs.token_logprobs


def test_a_harness_finds_out_whether_a_continuation_is_greedy(client, model):
  """As lm-evaluation-harness asks: lists of token ids, one more token sampled and cut off again."""
  context = model.tokenizer.encode('the sky :').tolist()
  greedy = complete(client, prompt=context, temperature=0, max_tokens=4).choices[0].token_ids
  other = [*greedy[:3], (greedy[3] + 1) % 16]
  answer = complete(
    client, prompt=[context + greedy, context + other], echo=True, logprobs=1, max_tokens=1
  )
  is_greedy = []
  for choice, tokens in zip(answer.choices, (greedy, other), strict=True):
    values = choice.logprobs.token_logprobs[len(context) : -1]
    tops = choice.logprobs.top_logprobs[len(context) : -1]
    want = log_probs(model, context + tokens)[len(context) - 1 :]
    np.testing.assert_allclose(sum(values), want[np.arange(4), tokens].sum(), atol=1e-4)
    is_greedy.append(all(v == max(top.values()) for v, top in zip(values, tops, strict=True)))
  assert is_greedy == [True, False]


def test_echo_alone_and_several_choices(client):
  bare = complete(client, echo=True, max_tokens=0, n=2, prompt=['one two', [3, 4]])
  assert [choice.text for choice in bare.choices] == ['one two'] * 2 + ['the sky'] * 2
  assert all(choice.logprobs is None and choice.token_ids == [] for choice in bare.choices)
  both = complete(client, echo=True, logprobs=0, n=2)
  first, second = (choice.logprobs.token_logprobs for choice in both.choices)
  assert first[:7] == second[:7] and first[7:] != second[7:]
  assert both.choices[0].logprobs.top_logprobs is None


def _check_prompt_log_probs(found, model, tokens, wanted):
  want = log_probs(model, tokens)
  assert found[0] is None and len(found) == len(tokens)
  for row, own, entry in zip(want, tokens[1:], found[1:], strict=True):
    order = np.argsort(-row)
    assert {int(token) for token in entry} == {own, *order[:wanted].tolist()}
    for token, fields in entry.items():
      assert fields['logprob'] == pytest.approx(row[int(token)], abs=1e-4)
      assert fields['rank'] == 1 + int(np.flatnonzero(order == int(token))[0])
      assert fields['decoded_token'] == model.tokenizer.id_to_piece(int(token))


@pytest.mark.parametrize(('wanted', 'max_tokens'), [(0, 0), (2, 3), (20, 0)])
def test_prompt_log_probs(client, model, wanted, max_tokens):
  extra = {'prompt_logprobs': wanted}
  choice = complete(client, extra_body=extra, max_tokens=max_tokens, n=2).choices[1]
  assert choice.text == model.tokenizer.decode(choice.token_ids) and choice.logprobs is None
  _check_prompt_log_probs(choice.prompt_logprobs, model, choice.prompt_token_ids, wanted)
  chat = client.chat.completions.create(
    model='toy',
    messages=[{'role': 'user', 'content': 'the sky two'}],
    max_tokens=max_tokens,
    extra_body=extra,
  )
  tokens = chat.choices[0].prompt_token_ids
  assert model.tokenizer.decode(tokens) == 'the sky two :'
  _check_prompt_log_probs(chat.prompt_logprobs, model, tokens, wanted)


def test_texts_longer_than_a_prompt_are_scored_where_nothing_is_sampled(client, model):
  tokens = np.random.default_rng(0).integers(0, 16, 60).tolist()
  choice = complete(client, prompt=tokens, echo=True, logprobs=0, max_tokens=0).choices[0]
  want = log_probs(model, tokens)[np.arange(59), tokens[1:]]
  np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], want, atol=1e-4)
  with pytest.raises(openai.BadRequestError, match='60 tokens, but at most 32') as caught:
    complete(client, prompt=tokens, echo=True, logprobs=0)
  assert caught.value.code == 'context_length_exceeded'


def test_scores_and_samples_at_once_do_not_change_each_other(client, server):
  def sampled(seed):
    return complete(client, seed=seed, max_tokens=60).choices[0].token_ids

  def scored(seed):
    tokens = np.random.default_rng(seed).integers(0, 16, 20 + seed).tolist()
    choice = complete(client, prompt=tokens, echo=True, logprobs=0, max_tokens=0).choices[0]
    return choice.logprobs.token_logprobs

  jobs = [(work, seed) for seed in range(4) for work in (sampled, scored)]
  alone = [work(seed) for work, seed in jobs]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    together = list(pool.map(lambda job: job[0](job[1]), jobs))
  assert together == alone
  assert server.bridge.in_flight == 0


def test_the_bridge_scores_without_sampling(server):
  nothing, prompt = SamplingParams(max_tokens=0, seed=1), np.asarray([3, 4, 5], np.int32)
  bridge = server.bridge

  async def ask():
    ticket = bridge.submit([prompt, prompt[:2]], nothing, count=2, timeout_s=30, prompt_top=1)
    samples = await ticket.results()
    assert [(len(s.tokens), s.finish_reason) for s in samples] == [(0, FinishReason.LENGTH)] * 4
    assert [score.tokens.tolist() for score in ticket.scores] == [[3, 4, 5], [3, 4]]
    assert ticket.done and bridge.in_flight == 0
    times = ticket.times
    assert times.arrived_s <= times.admitted_s <= times.finished_s and times.first_token_s is None
    with pytest.raises(PromptTooLongError, match='has 8033 tokens, but at most 8032 can be scored'):
      bridge.submit([np.zeros(8033, np.int32)], nothing, timeout_s=30, prompt_top=0)
    with pytest.raises(ValueError, match=r'top must be in \[0, 20\], got 21'):
      bridge.submit([prompt], nothing, timeout_s=30, prompt_top=21)

  asyncio.run(ask())
