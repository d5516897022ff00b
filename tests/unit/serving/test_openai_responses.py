"""Samples as JSON: what of a text may be shown when, and chunks that add up to the whole."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.serving.openai_requests import ApiRequest
from rlax_stack.serving.openai_responses import Answer, encode_event, encode_json, visible_text
from rlax_stack.serving.ticket import Update
from rlax_stack.types import FinishReason, SamplingParams


def byte_tokenizer():
  """One token per byte, as in byte-level vocabularies, and an end token."""
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {'<end>': 0, **{letter: i + 1 for i, letter in enumerate(letters)}}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(['<end>'])
  return Tokenizer(backend, eos_id=0)


TOKENIZER = byte_tokenizer()


def update(tokens, reason=None, index=0):
  tokens = np.asarray(tokens, np.int32)
  values = -np.arange(len(tokens)).astype(np.float32) / 3
  return Update(index, tokens, values, values * 2, np.full(len(tokens), 4, np.int32), reason)


def make_answer(stops=(), chat=False, log_probs=True, count=1):
  request = ApiRequest(
    chat=chat,
    prompts=(np.asarray([1, 2], np.int32),),
    sampling=SamplingParams(stop_strings=stops),
    count=count,
    stream=True,
    include_usage=False,
    log_probs=log_probs,
    timeout_s=1.0,
  )
  return Answer(request, model='m', seed=5, tokenizer=TOKENIZER)


@pytest.mark.parametrize(
  ('text', 'stops', 'running', 'ended'),
  [
    ('abc', (), 'abc', 'abc'),
    ('abc', ('cd',), 'ab', 'abc'),
    ('abcd', ('cd',), 'ab', 'ab'),
    ('abcdx', ('cd', 'b'), 'a', 'a'),
    ('aab', ('aabc', 'abd'), '', 'aab'),
    ('x\ufffd', (), 'x', 'x\ufffd'),
  ],
)
def test_what_may_be_shown(text, stops, running, ended):
  assert visible_text(text, stops, ended=False) == running
  assert visible_text(text, stops, ended=True) == ended


@given(
  text=st.text(alphabet='ab\u00e9\u2603', min_size=1, max_size=30),
  stops=st.lists(st.text(alphabet='ab\u2603', min_size=1, max_size=3), max_size=2),
  cuts=st.sets(st.integers(1, 60), max_size=6),
  chat=st.booleans(),
)
def test_chunks_add_up_to_the_whole(text, stops, cuts, chat):
  """Wherever a stream is cut: within a character, within a stop string."""
  tokens = TOKENIZER.encode(text).tolist()
  found = [
    i for i in range(1, len(tokens) + 1) if any(s in TOKENIZER.decode(tokens[:i]) for s in stops)
  ]
  reason = FinishReason.LENGTH
  if found:  # as the scheduler does: the sample ends with the token that completes a stop string
    tokens, reason = tokens[: found[0]], FinishReason.STOP_STRING
  whole = make_answer(tuple(stops), chat).whole([update(tokens, reason)])['choices'][0]
  stream = make_answer(tuple(stops), chat)
  parts = [
    chunk['choices'][0]
    for cut in sorted(cut for cut in cuts if cut < len(tokens))
    for chunk in stream.chunks([update(tokens[:cut])])
  ]
  parts += [chunk['choices'][0] for chunk in stream.chunks([update(tokens, reason)])]

  def texts(choice, name):
    return choice[name]['content'] if chat else choice['text']

  assert ''.join(texts(part, 'delta') for part in parts) == texts(whole, 'message')
  for name in ('token_ids', 'log_probs', 'raw_log_probs', 'versions'):
    assert sum((part[name] for part in parts), []) == whole[name]
  assert [part['finish_reason'] for part in parts[:-1]] == [None] * (len(parts) - 1)
  assert parts[-1]['finish_reason'] == whole['finish_reason']
  for name in ('content',) if chat else ('tokens', 'token_logprobs', 'text_offset'):
    assert sum((part['logprobs'][name] for part in parts), []) == whole['logprobs'][name]


def test_the_whole_answer():
  samples = [update([3, 0], FinishReason.STOP, 0), update([4], FinishReason.LENGTH, 1)]
  body = make_answer(count=2).whole(samples)
  assert (body['object'], body['model'], body['seed']) == ('text_completion', 'm', 5)
  assert body['usage'] == {'prompt_tokens': 2, 'completion_tokens': 3, 'total_tokens': 5}
  first, second = body['choices']
  assert (first['finish_reason'], first['raw_finish_reason']) == ('stop', 'stop')
  assert (second['finish_reason'], second['index']) == ('length', 1)
  assert first['token_ids'] == [3, 0] and first['text'] == TOKENIZER.decode([3])
  assert first['prompt_token_ids'] == second['prompt_token_ids'] == [1, 2]
  assert first['logprobs']['tokens'][1] == '<end>' and first['versions'] == [4, 4]
  usage = make_answer(chat=True).usage_chunk(samples[:1])
  assert (usage['object'], usage['choices']) == ('chat.completion.chunk', [])
  assert usage['usage'] == make_answer().usage(samples[:1])


def test_json_keeps_float32_and_refuses_what_is_not_finite():
  values = np.random.default_rng(0).standard_normal(100).astype(np.float32)
  back = np.asarray(
    json.loads(encode_json({'x': values.astype(np.float64).tolist()}))['x'], np.float32
  )
  np.testing.assert_array_equal(back, values)
  assert encode_event({'a': '\u00e9'}) == b'data: {"a":"\xc3\xa9"}\n\n'
  assert encode_json({'a': '\ud800'}) == b'{"a":"?"}'
  with pytest.raises(ValueError):
    encode_json({'a': float('nan')})
