"""Bodies in OpenAI's shape: what they ask for, and which errors clients are told."""

import numpy as np
import pytest
import tokenizers

from rlax_stack.errors import FleetError, PromptTooLongError
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.serving.api_error import ApiError, api_error
from rlax_stack.serving.bridge import OverloadedError
from rlax_stack.serving.openai_requests import Served, parse_json, read_request
from rlax_stack.serving.ticket import DeadlineError
from rlax_stack.types import SamplingParams

WORDS = {word: i for i, word in enumerate('<end> <unk> a b c f user assistant tool 1'.split())}
TEMPLATE = (
  '{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}'
  '{{ m.role }} {{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.name }} '
  '{{ c.function.arguments.x }} {% endfor %}{% endfor %}'
)
TOOL = {'type': 'function', 'function': {'name': 'f'}}


def make_served(template=TEMPLATE):
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token='<unk>'))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return Served(
    name='m',
    tokenizer=Tokenizer(backend, eos_id=0, chat_template=template),
    defaults=SamplingParams(
      temperature=0.7, top_p=0.9, max_tokens=20, stop_token_ids=(0,), stop_strings=('c',)
    ),
    context=24,
    timeout_s=30.0,
  )


SERVED = make_served()


def read(chat=False, served=SERVED, **body):
  if not chat:
    body = {'prompt': 'a b', **body}
  return read_request(body, served, chat=chat)


def spelled(request):
  return [' '.join(list(WORDS)[t] for t in prompt) for prompt in request.prompts]


def test_silence_takes_the_defaults():
  request = read()
  assert request.sampling == SERVED.defaults
  assert (request.count, request.stream, request.log_probs, request.timeout_s) == (
    1,
    False,
    False,
    30,
  )
  assert spelled(request) == ['a b'] and request.prompts[0].dtype == np.int32
  # Without max_tokens as many as the context leaves.
  assert read(prompt='a ' * 10).sampling.max_tokens == 14


def test_every_field_arrives():
  request = read(
    model='m',
    temperature=0,
    top_k=-1,
    top_p=0.5,
    min_p=0.1,
    max_tokens=3,
    stop_token_ids=[],
    stop='b',
    seed=-1,
    n=2,
    stream=True,
    stream_options={'include_usage': True},
    logprobs=0,
    timeout_s=1,
    user='somebody',
  )
  assert request.sampling == SamplingParams(
    temperature=0,
    top_k=0,
    top_p=0.5,
    min_p=0.1,
    max_tokens=3,
    stop_strings=('b',),
    seed=2**32 - 1,
  )
  assert (request.count, request.stream, request.include_usage) == (2, True, True)
  assert (request.log_probs, request.timeout_s) == (True, 1.0)
  assert read(stop=[]).sampling.stop_strings == ()


@pytest.mark.parametrize(
  ('fields', 'echo', 'of_prompt', 'top', 'max_tokens'),
  [
    ({}, False, None, None, 20),
    ({'logprobs': 3}, False, None, None, 20),
    ({'echo': True, 'max_tokens': 0}, True, None, None, 0),
    ({'echo': True, 'logprobs': 0, 'max_tokens': 0}, True, None, 0, 0),
    ({'echo': True, 'logprobs': 3}, True, None, 3, 20),
    ({'prompt_logprobs': 0, 'max_tokens': 0}, False, 0, 1, 0),
    ({'prompt_logprobs': 2, 'logprobs': 4, 'echo': True}, True, 2, 4, 20),
    ({'prompt_logprobs': 5, 'logprobs': 4}, False, 5, 5, 20),
  ],
)
def test_what_is_asked_about_the_prompt(fields, echo, of_prompt, top, max_tokens):
  request = read(**fields)
  assert (request.echo, request.prompt_log_probs, request.prompt_top) == (echo, of_prompt, top)
  assert request.sampling.max_tokens == max_tokens


@pytest.mark.parametrize(
  ('chat', 'fields', 'param', 'says'),
  [
    (False, {'max_tokens': 0}, 'max_tokens', 'needs echo or prompt_logprobs'),
    (False, {'max_tokens': 0, 'logprobs': 1}, 'max_tokens', 'needs echo or prompt_logprobs'),
    (True, {'max_completion_tokens': 0}, 'max_completion_tokens', 'max_completion_tokens=0 samples'),
    (False, {'max_tokens': -1, 'echo': True}, 'max_tokens', 'from 0 to 20, got -1'),
    (False, {'echo': 1}, 'echo', 'must be true or false'),
    (False, {'echo': True, 'stream': True}, 'stream', 'do not go with stream'),
    (True, {'prompt_logprobs': 0, 'stream': True}, 'stream', 'do not go with stream'),
    (False, {'prompt_logprobs': -1}, 'prompt_logprobs', 'from 0 to 20, got -1'),
    (False, {'prompt_logprobs': True}, 'prompt_logprobs', 'must be an integer'),
    (True, {'echo': True}, 'echo', 'echo is not supported'),
  ],
)  # fmt: skip
def test_questions_about_the_prompt_that_are_refused(chat, fields, param, says):
  body = {'messages': [{'role': 'user', 'content': 'a'}]} if chat else {}
  with pytest.raises(ApiError) as caught:
    read(chat=chat, **body, **fields)
  assert (caught.value.status, caught.value.param) == (400, param)
  assert says in caught.value.message
  if chat:
    assert not read(chat=True, **body, echo=False).echo


@pytest.mark.parametrize(
  ('prompt', 'want'),
  [
    ('a', ['a']),
    (['a', 'b c'], ['a', 'b c']),
    ([2, 3], ['a b']),
    ([[2], [3, 4]], ['a', 'b c']),
    (['a', [3]], ['a', 'b']),
  ],
)
def test_prompts_are_texts_or_tokens(prompt, want):
  assert spelled(read(prompt=prompt)) == want


def test_chats_go_through_the_template_with_tools_and_calls():
  messages = [
    {'role': 'user', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': ' b'}]},
    {
      'role': 'assistant',
      'content': None,
      'tool_calls': [
        {'id': '1', 'type': 'function', 'function': {'name': 'f', 'arguments': '{"x": 1}'}}
      ],
    },
    {'role': 'tool', 'tool_call_id': '1', 'content': 'c'},
  ]
  plain = 'user a b assistant f 1 tool c'
  assert spelled(read(chat=True, messages=messages)) == [plain]
  assert spelled(read(chat=True, messages=messages, tools=[TOOL])) == [f'f {plain}']
  none = read(chat=True, messages=messages, tools=[TOOL], tool_choice='none', logprobs=True)
  assert spelled(none) == [plain] and none.log_probs
  assert read(chat=True, messages=messages, max_completion_tokens=2).sampling.max_tokens == 2
  # A call that the model spoilt stays what it was.
  messages[1]['tool_calls'][0]['function']['arguments'] = '{"x": '
  read(chat=True, messages=messages)


@pytest.mark.parametrize(
  ('changes', 'param', 'says'),
  [
    ({'messages': []}, 'messages', 'at least one message'),
    ({'messages': ['a']}, 'messages[0]', 'an object with a role'),
    ({'messages': [{'role': 'user', 'content': 3}]}, 'messages[0]', 'must be a text'),
    (
      {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
      'messages[0]',
      'text parts only',
    ),
    ({'tools': 'f'}, 'tools', 'a list of objects'),
    ({'tool_choice': 'required'}, 'tool_choice', 'auto or none'),
    ({'logprobs': 1}, 'logprobs', 'true or false'),
    ({'top_logprobs': 2}, 'top_logprobs', 'needs logprobs'),
    ({'response_format': {'type': 'json_object'}}, 'response_format', 'not supported'),
    ({'prompt': 'a'}, 'prompt', 'unknown field'),
    ({'stream_options': {'x': 1}}, 'stream_options', 'include_usage'),
    ({'n': 5000}, 'n', 'from 1 to 4096'),
  ],
)
def test_chats_that_are_refused(changes, param, says):
  body = {'messages': [{'role': 'user', 'content': 'a'}], **changes}
  with pytest.raises(ApiError) as caught:
    read(chat=True, **body)
  assert (caught.value.status, caught.value.param) == (400, param)
  assert says in caught.value.message


def test_a_template_without_tools_says_so():
  served = make_served('{% for m in messages %}{{ m.content }}{% endfor %}')
  with pytest.raises(ApiError, match='no place for tools'):
    read(chat=True, served=served, messages=[{'role': 'user', 'content': 'a'}], tools=[TOOL])


def test_many_choices_are_bounded_before_they_exist():
  with pytest.raises(ApiError, match='at most 4096'):
    read(prompt=['a'] * 100, n=100)


@pytest.mark.parametrize(
  ('error', 'status', 'kind', 'code'),
  [
    (PromptTooLongError('x'), 400, 'invalid_request_error', 'context_length_exceeded'),
    (OverloadedError('x', 3), 429, 'rate_limit_error', 'overloaded'),
    (DeadlineError('x'), 504, 'server_error', 'deadline_exceeded'),
    (TimeoutError(), 504, 'server_error', 'deadline_exceeded'),
    (FleetError('x'), 503, 'server_error', 'engine_stopped'),
    (KeyError('secret'), 500, 'server_error', 'internal'),
  ],
)
def test_errors_become_answers(error, status, kind, code):
  found = api_error(error)
  body = found.body()['error']
  assert (found.status, body['type'], body['code']) == (status, kind, code)
  assert 'secret' not in body['message']
  assert found.retry_after_s == (3 if status == 429 else None)


def test_parse_json_takes_objects_only():
  assert parse_json(b'{"a": [1, 2.5]}') == {'a': [1, 2.5]}
  for raw in (b'', b'[]', b'{"a": Infinity}', b'{"a":' * 100000, b'{"a": ' + b'9' * 5000 + b'}'):
    with pytest.raises(ApiError):
      parse_json(raw)
