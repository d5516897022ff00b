"""Samples as JSON: what of a text may be shown when, and chunks that add up to the whole."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.rollout.requests import PromptScore
from rlax_stack.serving.openai_requests import ApiRequest
from rlax_stack.serving.openai_responses import Answer, encode_event, encode_json, visible_text
from rlax_stack.serving.ticket import Update
from rlax_stack.serving.token_log_probs import (
  by_text,
  echo_log_probs,
  floats,
  likeliest,
  pieces,
  prompt_log_probs,
)
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


def make_answer(
  stops=(), chat=False, log_probs=True, count=1, echo=False, of_prompt=None, tops=0, tokens=(1, 2)
):
  request = ApiRequest(
    chat=chat,
    prompts=(np.asarray(tokens, np.int32),),
    sampling=SamplingParams(stop_strings=stops, top_log_probs=tops),
    count=count,
    stream=True,
    include_usage=False,
    log_probs=log_probs,
    echo=echo,
    prompt_log_probs=of_prompt,
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


def prompt_score(tokens):
  """Every token has rank 3, log-prob -2 - place; before it come token 0 (rank 1) and token 9."""
  tokens = np.asarray(tokens, np.int32)
  places = np.arange(len(tokens), dtype=np.float32)
  values = np.stack([-places / 4, -places / 2, -2 - places], 1)
  return PromptScore(
    tokens=tokens,
    log_probs_t=values[:, 2],
    version=6,
    top_ids_t=np.stack([tokens * 0, tokens * 0 + 9, tokens], 1),
    top_log_probs_t=values,
    rank_t=tokens * 0 + 3,
  )


def test_an_echoed_prompt_comes_first():
  tokens = TOKENIZER.encode('ab\u00e9').tolist() + [
    0
  ]  # a letter of two tokens, and a special token
  score = prompt_score(tokens)
  sample = update(TOKENIZER.encode('xy'), FinishReason.LENGTH)
  body = make_answer(echo=True, tokens=tokens).whole([sample], [score])
  choice = body['choices'][0]
  assert choice['text'] == 'ab\u00e9<end>xy' and choice['prompt_version'] == 6
  found = choice['logprobs']
  assert found['tokens'] == ['a', 'b', '\ufffd', '\ufffd', '<end>', 'x', 'y']
  assert found['token_logprobs'] == [None, -3, -4, -5, -6, *choice['raw_log_probs']]
  assert found['text_offset'] == [0, 1, 2, 3, 4, 9, 10] and found['top_logprobs'] is None
  assert choice['token_ids'] == sample.tokens.tolist() and 'prompt_logprobs' not in choice
  assert body['usage'] == {'prompt_tokens': 5, 'completion_tokens': 2, 'total_tokens': 7}
  plain = make_answer(tokens=tokens).whole([sample])['choices'][0]
  assert plain['text'] == 'xy' and 'prompt_version' not in plain
  bare = make_answer(echo=True, log_probs=False, tokens=tokens).whole([sample])['choices'][0]
  assert bare['text'] == choice['text'] and bare['logprobs'] is None
  with_tops = make_answer(echo=True, tokens=tokens, tops=3)
  empty = update([], FinishReason.LENGTH)
  tops = with_tops.whole([empty], [score])['choices'][0]['logprobs']['top_logprobs']
  assert tops[0] is None and len(tops) == 5
  assert list(tops[1].items()) == [('<end>', -0.25), (TOKENIZER.decode([9]), -0.5), ('b', -3.0)]


def test_tokens_of_one_text_keep_the_likeliest():
  assert by_text([('a', -1.0), ('\ufffd', -2.0), ('\ufffd', -3.0)]) == {'a': -1.0, '\ufffd': -2.0}


@pytest.mark.parametrize('wanted', [0, 1, 3])
@pytest.mark.parametrize('chat', [False, True])
def test_prompt_log_probs_by_token_id(chat, wanted):
  answer = make_answer(chat=chat, of_prompt=wanted, tokens=(4, 5, 9), log_probs=False)
  body = answer.whole([update([3], FinishReason.LENGTH)], [prompt_score([4, 5, 9])])
  assert ('prompt_logprobs' in body) == chat
  found = body['prompt_logprobs'] if chat else body['choices'][0]['prompt_logprobs']
  text = TOKENIZER.decode

  def entry(token, value, rank):
    piece = text([token], skip_special_tokens=False)
    return {str(token): {'logprob': value, 'rank': rank, 'decoded_token': piece}}

  second, third = entry(5, -3.0, 3), entry(9, -4.0, 3)
  if wanted:
    second |= entry(0, -0.25, 1)
    third |= entry(0, -0.5, 1)
  if wanted == 3:
    second |= entry(9, -0.5, 2)
  assert found == [None, second, third]
  unranked = PromptScore(tokens=np.ones(2, np.int32), log_probs_t=np.zeros(2), version=0)
  with pytest.raises(ValueError, match='top above 0'):
    prompt_log_probs(TOKENIZER, unranked, wanted)


def test_parts_of_log_probs():
  ids, values = np.array([[3, 0, -1]], np.int32), np.array([[-0.5, -1, -np.inf]], np.float32)
  assert pieces(TOKENIZER, [0]) == ['<end>'] and floats(values[0, :2]) == [-0.5, -1.0]
  assert likeliest(TOKENIZER, ids, values, 3) == [[(TOKENIZER.decode([3]), -0.5), ('<end>', -1.0)]]
  score = prompt_score([4])  # a prompt of one token has no numbers at all
  assert echo_log_probs(TOKENIZER, score, 1)['top_logprobs'] == [None]
  assert echo_log_probs(TOKENIZER, score, 0)['token_logprobs'] == [None]


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
