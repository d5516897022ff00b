"""The endpoint as clients see it, through OpenAI's own client library on loopback."""

import concurrent.futures

import jax.numpy as jnp
import numpy as np
import openai
import pytest

from rlax_stack.models import decoder
from rlax_stack.models.load import load_model
from rlax_stack.rollout.prefill import causal_attention

PROMPT = 'the sky : one'
NO_STOP = {'stop_token_ids': []}


@pytest.fixture(scope='module')
def client(server):
  with openai.OpenAI(base_url=server.url, api_key='unused', max_retries=0, timeout=60) as made:
    yield made


@pytest.fixture(scope='module')
def model(long_model):
  return load_model(long_model)


def complete(client, **fields):
  fields = {'model': 'toy', 'prompt': PROMPT, 'max_tokens': 24, 'seed': 1, **fields}
  extra = {**NO_STOP, **fields.pop('extra_body', {})}
  return client.completions.create(**fields, extra_body=extra)


def model_log_probs(model, prompt, tokens):
  """Log-probs of the tokens at temperature 1, by the plain decoder."""
  row = np.asarray([*prompt, *tokens], np.int32)[None]
  positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
  hidden = decoder.hidden_states(model.params, model.config, row, positions, causal_attention)
  logits = np.asarray(hidden[0] @ decoder.lm_head(model.params, model.config).T, np.float64)
  logits = logits[len(prompt) - 1 : -1]
  return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(tokens)), tokens]


def test_a_completion_is_token_exact(client, model):
  choice = complete(client, logprobs=0).choices[0]
  assert choice.prompt_token_ids == model.tokenizer.encode(PROMPT).tolist()
  assert (
    len(choice.token_ids) == 24 and choice.finish_reason == choice.raw_finish_reason == 'length'
  )
  assert choice.text == model.tokenizer.decode(choice.token_ids)
  assert choice.versions == [0] * 24
  want = model_log_probs(model, choice.prompt_token_ids, choice.token_ids)
  np.testing.assert_allclose(choice.raw_log_probs, want, atol=1e-4)
  np.testing.assert_allclose(choice.log_probs, want, atol=1e-4)  # temperature 1, no filters
  assert choice.logprobs.token_logprobs == choice.raw_log_probs
  assert [model.tokenizer.piece_to_id(t) for t in choice.logprobs.tokens] == choice.token_ids


def test_log_probs_are_of_the_distribution_that_was_sampled(client, model):
  choice = complete(client, temperature=0.5).choices[0]
  raw = choice.raw_log_probs
  want = model_log_probs(model, choice.prompt_token_ids, choice.token_ids)
  np.testing.assert_allclose(raw, want, atol=1e-4)
  assert np.abs(np.subtract(choice.log_probs, raw)).max() > 1e-3
  greedy = complete(client, temperature=0).choices[0]
  assert greedy.log_probs == [0.0] * 24 and max(greedy.raw_log_probs) < 0


def test_tokens_go_in_as_they_came_out(client, model):
  first = complete(client, max_tokens=8).choices[0]
  so_far = first.prompt_token_ids + first.token_ids
  second = complete(client, prompt=so_far, temperature=0).choices[0]
  assert second.prompt_token_ids == so_far
  many = complete(client, prompt=[so_far, model.tokenizer.encode(PROMPT).tolist()], n=2)
  assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
  assert [len(choice.prompt_token_ids) for choice in many.choices] == [12, 12, 4, 4]
  assert many.usage.prompt_tokens == 16 and many.usage.completion_tokens == 96


def test_a_seed_and_a_body_name_a_sample(client):
  first, again, other = complete(client, n=3), complete(client, n=3), complete(client, n=3, seed=2)
  texts = [choice.text for choice in first.choices]
  assert len(set(texts)) == 3
  assert [choice.text for choice in again.choices] == texts
  assert [choice.log_probs for choice in again.choices] == [c.log_probs for c in first.choices]
  assert [choice.text for choice in other.choices] != texts
  # Without one the answer says which seed it took, and that one gives it again.
  free = complete(client, seed=openai.omit)
  assert complete(client, seed=free.seed).choices[0].token_ids == free.choices[0].token_ids
  assert free.seed != complete(client, seed=openai.omit).seed


@pytest.mark.parametrize(
  'fields', [{}, {'stop': ['sun rose', 'blue red']}, {'n': 3, 'logprobs': 0}]
)
def test_a_stream_is_the_whole_in_pieces(client, fields):
  whole = complete(client, max_tokens=200, **fields)
  parts = {choice.index: [] for choice in whole.choices}
  chunks = list(
    complete(client, max_tokens=200, stream=True, stream_options={'include_usage': True}, **fields)
  )
  assert len(chunks) > 5
  for chunk in chunks:
    for choice in chunk.choices:
      parts[choice.index].append(choice)
  for want in whole.choices:
    got = parts[want.index]
    assert ''.join(part.text for part in got) == want.text
    for name in ('token_ids', 'log_probs', 'raw_log_probs', 'versions'):
      assert sum((getattr(part, name) for part in got), []) == getattr(want, name)
    assert [p.finish_reason for p in got] == [None] * (len(got) - 1) + [want.finish_reason]
    assert got[0].prompt_token_ids == want.prompt_token_ids
    if fields.get('logprobs') == 0:
      for name in ('tokens', 'token_logprobs', 'text_offset'):
        merged = sum((getattr(part.logprobs, name) for part in got), [])
        assert merged == getattr(want.logprobs, name)
  assert chunks[-1].usage == whole.usage


def test_stop_strings_end_the_text_before_them_and_stay_in_the_tokens(client, model):
  whole = complete(client, max_tokens=200).choices[0].text
  words = whole.split()
  stop = ' '.join(words[5:7])
  choice = complete(client, max_tokens=200, stop=stop).choices[0]
  assert choice.text == whole[: whole.index(stop)] and stop not in choice.text
  assert choice.finish_reason == 'stop' and choice.raw_finish_reason == 'stop_string'
  decoded = model.tokenizer.decode(choice.token_ids)
  assert decoded.endswith(stop) and decoded.startswith(choice.text)


def test_a_stop_string_that_never_comes_changes_nothing(client):
  plain = complete(client)
  choice = complete(client, stop=['\u2603 never', '\x00']).choices[0]
  assert (choice.text, choice.finish_reason) == (plain.choices[0].text, 'length')


def test_stop_tokens_are_the_tokenizers_unless_others_are_named(client, model):
  def ended(extra):
    fields = {'model': 'toy', 'prompt': PROMPT, 'max_tokens': 400, 'seed': 1}
    return client.completions.create(**fields, extra_body=extra).choices[0]

  own = ended({})
  assert own.token_ids[-1] == model.tokenizer.eos_id and own.raw_finish_reason == 'stop'
  other = model.tokenizer.piece_to_id('sun')
  assert ended({'stop_token_ids': [other]}).token_ids[-1] == other
  assert len(ended(NO_STOP).token_ids) == 400


def test_chat_renders_the_template_and_streams_deltas(client, model):
  messages = [
    {'role': 'system', 'content': 'one'},
    {'role': 'user', 'content': [{'type': 'text', 'text': 'the sky'}]},
  ]
  fields = {'model': 'toy', 'messages': messages, 'max_completion_tokens': 12, 'seed': 3}
  whole = client.chat.completions.create(**fields, logprobs=True, extra_body=NO_STOP)
  choice = whole.choices[0]
  assert model.tokenizer.decode(choice.prompt_token_ids, skip_special_tokens=False) == (
    'one the sky :'
  )
  assert choice.message.role == 'assistant' and choice.message.content
  assert [item.logprob for item in choice.logprobs.content] == choice.raw_log_probs
  assert whole.usage.completion_tokens == len(choice.token_ids) == 12
  chunks = list(client.chat.completions.create(**fields, stream=True, extra_body=NO_STOP))
  assert chunks[0].choices[0].delta.role == 'assistant'
  deltas = [chunk.choices[0].delta.content for chunk in chunks]
  assert ''.join(deltas) == choice.message.content


def test_many_clients_at_once_get_what_each_gets_alone(client, server):
  def one(seed):
    return complete(client, seed=seed, max_tokens=40 + seed).choices[0]

  alone = [one(seed) for seed in range(8)]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    together = list(pool.map(one, range(8)))
  for got, want in zip(together, alone, strict=True):
    assert (got.token_ids, got.log_probs) == (want.token_ids, want.log_probs)
  assert server.bridge.in_flight == 0


def test_models_are_listed_with_their_limits(client):
  (model,) = client.models.list().data
  assert (model.id, model.max_prompt_tokens, model.max_tokens) == ('toy', 32, 8000)


def test_penalties_biases_and_likeliest_tokens(client, model):
  tokenizer = model.tokenizer
  plain = complete(client, temperature=0, max_tokens=6, logprobs=3, extra_body=NO_STOP).choices[0]
  for place, (token, top) in enumerate(
    zip(plain.logprobs.tokens, plain.logprobs.top_logprobs, strict=True)
  ):
    assert 1 <= len(top) <= 3  # tokens may share a text
    assert max(top, key=top.get) == token  # greedy takes the likeliest
    assert top[token] == pytest.approx(plain.raw_log_probs[place], abs=1e-5)
  banned = plain.token_ids[0]
  biased = complete(
    client, temperature=0, max_tokens=6, logit_bias={str(banned): -100}, extra_body=NO_STOP
  )
  assert banned not in biased.choices[0].token_ids
  wanted = tokenizer.piece_to_id(plain.logprobs.tokens[0])
  forced = complete(
    client, temperature=0, max_tokens=4, logit_bias={str(wanted): 100}, extra_body=NO_STOP
  )
  assert forced.choices[0].token_ids == [wanted] * 4
  varied = complete(
    client,
    temperature=0,
    max_tokens=4,
    logit_bias={str(wanted): 1.9},
    presence_penalty=2,
    frequency_penalty=2,
    extra_body=NO_STOP,
  )
  assert varied.choices[0].token_ids.count(wanted) < 4
