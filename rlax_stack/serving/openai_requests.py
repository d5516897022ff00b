"""JSON bodies in OpenAI's shape to what the engine is asked for. Pure functions, nothing is silently ignored.

A field that would change the samples and cannot be honoured is refused by its name; `_WITHOUT_EFFECT` lists the ones
that say nothing about samples. Beside OpenAI's fields: prompts as token ids, `top_k`, `min_p`, `min_tokens`,
`repetition_penalty`, `stop_token_ids` (in place of the tokenizer's own; empty: no token ends a sample), `timeout_s` and
`prompt_logprobs`. With the latter, or with `echo`, max_tokens may be 0: nothing is sampled then.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlax_stack.config import nearest
from rlax_stack.errors import ModelFileError
from rlax_stack.models.chat_template import Turn
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.serving.api_error import ApiError
from rlax_stack.types import SamplingParams

_MAX_CHOICES = 4096  # n times prompts, before anything is allocated for them
_LARGE = 2**63
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256
_WITHOUT_EFFECT = {
  'metadata', 'parallel_tool_calls', 'prompt_cache_key', 'safety_identifier', 'service_tier', 'store', 'user',
}  # fmt: skip
# What is not there yet, with the values that ask for nothing.
_NOT_SUPPORTED = {
  'audio': (None,),
  'best_of': (None, 1),
  'echo': (None, False),  # of chats; completions have it
  'function_call': (None, 'none'),
  'functions': (None, []),
  'modalities': (None, ['text']),
  'prediction': (None,),
  'response_format': (None, {'type': 'text'}),
  'suffix': (None, ''),
}
_COMMON = {
  'max_tokens', 'min_p', 'model', 'n', 'seed', 'stop', 'stop_token_ids', 'stream', 'stream_options', 'temperature',
  'timeout_s', 'top_k', 'top_p', 'logprobs', 'frequency_penalty', 'presence_penalty', 'repetition_penalty',
  'logit_bias', 'min_tokens', 'prompt_logprobs',
}  # fmt: skip
_OF_CHAT = {'top_logprobs', 'max_completion_tokens', 'messages', 'tool_choice', 'tools'}
_OF_COMPLETION = {'prompt', 'echo'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """What requests are read against.

  name: of the model. defaults: of sampling, where a request is silent. context: tokens of prompt and sample together.
  timeout_s: the longest and the default.
  """

  name: str
  tokenizer: Tokenizer
  defaults: SamplingParams
  context: int
  timeout_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiRequest:
  """A checked request. `prompts` are int32 [P] each; `sampling.seed` is None where the request names none.

  echo: whether prompts are part of the answer. prompt_log_probs: likeliest tokens per prompt token in a list of their
  own; None for no list. Nothing is sampled where `sampling.max_tokens` is 0.
  """

  chat: bool
  prompts: tuple[np.ndarray, ...]
  sampling: SamplingParams
  count: int
  stream: bool
  include_usage: bool
  log_probs: bool
  echo: bool
  prompt_log_probs: int | None
  timeout_s: float

  @property
  def prompt_top(self) -> int | None:
    """Likeliest tokens per prompt token that the engine has to find; None where it need not score prompts."""
    if self.prompt_log_probs is not None:
      wanted = max(1, self.prompt_log_probs)  # ranks come with one
    elif self.echo and self.log_probs:
      wanted = 0
    else:
      return None
    return max(wanted, self.sampling.top_log_probs) if self.echo else wanted


def parse_json(raw: bytes) -> dict[str, Any]:
  """The JSON object of a body; ApiError 400 for anything else."""

  def refuse(constant: str) -> Any:
    raise ValueError(f'{constant} is no JSON')

  try:
    body = json.loads(raw, parse_constant=refuse)
  except (ValueError, RecursionError) as error:
    raise ApiError(400, f'the body is not JSON: {str(error)[:200]}') from error
  if not isinstance(body, dict):
    raise ApiError(400, f'the body must be a JSON object, got {type(body).__name__}.')
  return body


def read_request(body: Mapping[str, Any], served: Served, *, chat: bool) -> ApiRequest:
  """Checks a body of /v1/chat/completions (`chat`) or /v1/completions and makes its tokens.

  Raises:
    ApiError: 400 with the field that is wrong; 404 for another model's name.
  """
  _check_names(body, chat)
  model = body.get('model', served.name)
  if model != served.name:
    message = f'the model {str(model)[:100]!r} is not served here, {served.name!r} is.'
    raise ApiError(404, message, param='model', code='model_not_found')
  prompts = (_chat_prompt(body, served),) if chat else _prompts(body, served.tokenizer)
  count = _number(body, 'n', 1, kind=int, low=1, high=_MAX_CHOICES)
  if count * len(prompts) > _MAX_CHOICES:
    raise _wrong('n', f'n times the number of prompts must be at most {_MAX_CHOICES}')
  options = body.get('stream_options') or {}
  if not isinstance(options, dict) or set(options) - {'include_usage', 'include_obfuscation'}:
    raise _wrong('stream_options', f'stream_options may hold include_usage, got {options!r:.100}')
  echo, stream = _flag(body, 'echo'), _flag(body, 'stream')
  prompt_log_probs = _number(body, 'prompt_logprobs', None, kind=int, low=0, high=20)
  if stream and (echo or prompt_log_probs is not None):
    message = 'echo and prompt_logprobs do not go with stream. Leave stream out'
    raise _wrong('stream', message, code='unsupported_parameter')
  return ApiRequest(
    chat=chat,
    prompts=prompts,
    sampling=_sampling(body, served, chat=chat, longest_prompt=max(map(len, prompts))),
    count=count,
    stream=stream,
    include_usage=bool(options.get('include_usage')),
    log_probs=_log_probs(body, chat),
    echo=echo,
    prompt_log_probs=prompt_log_probs,
    timeout_s=_number(body, 'timeout_s', served.timeout_s, low=1e-3, high=served.timeout_s),
  )


def _check_names(body: Mapping[str, Any], chat: bool) -> None:
  known = _COMMON | (_OF_CHAT if chat else _OF_COMPLETION)
  for name, value in body.items():
    if name in known or name in _WITHOUT_EFFECT:
      continue
    if name not in _NOT_SUPPORTED:
      close = nearest(name[:100], known)
      raise _wrong(name[:100], f'unknown field {name[:100]!r}.{close}', code='unknown_parameter')
    if value not in _NOT_SUPPORTED[name]:
      raise _wrong(name, f'{name} is not supported. Leave it out', code='unsupported_parameter')


def _prompts(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[np.ndarray, ...]:
  """A text, texts, token ids or lists of token ids."""
  prompt = body.get('prompt')
  if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
    return tuple(_prompt(item, tokenizer) for item in prompt)
  return (_prompt(prompt, tokenizer),)


def _prompt(prompt: Any, tokenizer: Tokenizer) -> np.ndarray:
  if isinstance(prompt, str):
    tokens = tokenizer.encode(prompt)
  elif isinstance(prompt, list) and all(type(t) is int and 0 <= t < 2**31 for t in prompt):
    tokens = np.asarray(prompt, np.int32)
  else:
    raise _wrong('prompt', 'prompt must be a text, token ids, or a list of one of these')
  if not tokens.size:
    raise _wrong('prompt', 'prompt must hold at least one token')
  return tokens


def _chat_prompt(body: Mapping[str, Any], served: Served) -> np.ndarray:
  messages = body.get('messages')
  if not isinstance(messages, list) or not messages:
    raise _wrong('messages', 'messages must be a list with at least one message')
  tools, choice = body.get('tools', []), body.get('tool_choice')
  tools = [] if tools is None else tools
  if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
    raise _wrong('tools', 'tools must be a list of objects')
  if choice not in (None, 'auto', 'none'):
    raise _wrong('tool_choice', f'tool_choice must be auto or none, got {choice!r:.100}')
  turns = [_turn(message, f'messages[{i}]') for i, message in enumerate(messages)]
  try:
    tokens = served.tokenizer.encode_chat(turns, tools=[] if choice == 'none' else tools)
  except ModelFileError as error:
    raise _wrong('messages', str(error)) from error
  if not tokens.size:
    raise _wrong('messages', 'messages must hold at least one token')
  return tokens


def _turn(message: Any, where: str) -> Turn:
  """A message for the template: content as one text, arguments of tool calls as objects."""
  if not isinstance(message, dict) or not isinstance(message.get('role'), str):
    raise _wrong(where, f'{where} must be an object with a role and a content')
  content = message.get('content')
  if isinstance(content, list):
    texts = [part.get('text') if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
      raise _wrong(where, f'{where}.content may hold text parts only')
    content = ''.join(map(str, texts))
  if not isinstance(content, str | None):
    raise _wrong(where, f'{where}.content must be a text')
  turn = {**message, 'content': content or ''}
  calls = message.get('tool_calls')
  if calls is not None:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
      raise _wrong(where, f'{where}.tool_calls must be a list of objects')
    turn['tool_calls'] = [_tool_call(call) for call in calls]
  return turn


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
  """Templates want the arguments as an object; OpenAI's clients send them as text."""
  function = call.get('function')
  arguments = function.get('arguments') if isinstance(function, dict) else None
  if not isinstance(function, dict) or not isinstance(arguments, str):
    return dict(call)
  try:
    return {**call, 'function': {**function, 'arguments': json.loads(arguments)}}
  except (ValueError, RecursionError):
    return dict(call)  # a model's own malformed call is part of the history


def _sampling(
  body: Mapping[str, Any], served: Served, *, chat: bool, longest_prompt: int
) -> SamplingParams:
  defaults = served.defaults
  room = max(1, min(defaults.max_tokens, served.context - longest_prompt))
  return SamplingParams(
    temperature=_number(body, 'temperature', defaults.temperature, low=0),
    top_k=_top_k(body, defaults.top_k),
    top_p=_number(body, 'top_p', defaults.top_p, low=1e-9, high=1),
    min_p=_number(body, 'min_p', defaults.min_p, low=0, high=1),
    repetition_penalty=_number(
      body, 'repetition_penalty', defaults.repetition_penalty, low=1e-3, high=1e3
    ),
    presence_penalty=_penalty(body, 'presence_penalty', defaults.presence_penalty),
    frequency_penalty=_penalty(body, 'frequency_penalty', defaults.frequency_penalty),
    logit_bias=_logit_bias(body),
    min_tokens=_number(body, 'min_tokens', defaults.min_tokens, kind=int, low=0, high=_LARGE),
    top_log_probs=_top_log_probs(body, chat),
    max_tokens=_max_tokens(body, room, defaults.max_tokens),
    stop_token_ids=_stop_token_ids(body, defaults.stop_token_ids),
    stop_strings=_stop_strings(body, defaults.stop_strings),
    seed=_seed(body),
  )


def _max_tokens(body: Mapping[str, Any], default: int, most: int) -> int:
  """Tokens to sample at most; 0 where the prompt itself is asked about."""
  name = 'max_tokens' if body.get('max_completion_tokens') is None else 'max_completion_tokens'
  least = 0 if body.get('echo') or body.get('prompt_logprobs') is not None else 1
  if least and body.get(name) == 0:
    raise _wrong(name, f'{name}=0 samples nothing and needs echo or prompt_logprobs')
  return _number(body, name, default, kind=int, low=least, high=most)


def _top_k(body: Mapping[str, Any], default: int) -> int:
  """-1 is off too, as elsewhere."""
  return max(0, _number(body, 'top_k', default, kind=int, low=-1))


def _seed(body: Mapping[str, Any]) -> int | None:
  if body.get('seed') is None:
    return None
  return _number(body, 'seed', 0, kind=int, low=-(2**63), high=2**63 - 1) % 2**32


def _stop_strings(body: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
  stop = body.get('stop')
  if stop is None:
    return default
  stops = [stop] if isinstance(stop, str) else stop
  if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
    raise _wrong('stop', 'stop must be a text or a list of texts, none of them empty')
  if len(stops) > _MAX_STOPS or any(len(s) > _MAX_STOP_CHARACTERS for s in stops):
    limit = f'at most {_MAX_STOPS} texts of at most {_MAX_STOP_CHARACTERS} characters'
    raise _wrong('stop', f'stop may hold {limit}')
  return tuple(stops)


def _stop_token_ids(body: Mapping[str, Any], default: tuple[int, ...]) -> tuple[int, ...]:
  ids = body.get('stop_token_ids')
  if ids is None:
    return default
  if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < 2**31 for t in ids):
    raise _wrong('stop_token_ids', 'stop_token_ids must be a list of token ids')
  return tuple(ids)


def _penalty(body: Mapping[str, Any], name: str, default: float) -> float:
  return _number(body, name, default, low=-2, high=2)


def _logit_bias(body: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
  """Token ids (as JSON's texts) to biases."""
  bias = body.get('logit_bias')
  if bias is None:
    return ()
  fits = isinstance(bias, dict) and all(
    name.isascii()
    and name.isdigit()
    and len(name) < 10
    and type(value) in (int, float)
    and -100 <= value <= 100
    for name, value in bias.items()
  )
  if not fits:
    raise _wrong('logit_bias', 'logit_bias must map token ids to numbers from -100 to 100')
  return tuple((int(name), float(value)) for name, value in bias.items())


def _log_probs(body: Mapping[str, Any], chat: bool) -> bool:
  """Chat says true or false, completions a number of alternatives."""
  if chat:
    return _flag(body, 'logprobs')
  wanted = body.get('logprobs')
  return wanted is not None and wanted is not False


def _top_log_probs(body: Mapping[str, Any], chat: bool) -> int:
  """How many alternatives are wanted per token."""
  if not chat:
    wanted = body.get('logprobs')
    return 0 if isinstance(wanted, bool) else _number(body, 'logprobs', 0, kind=int, low=0, high=20)
  wanted = _number(body, 'top_logprobs', 0, kind=int, low=0, high=20)
  if wanted and not _flag(body, 'logprobs'):
    raise _wrong('top_logprobs', 'top_logprobs needs logprobs to be true')
  return wanted


def _flag(body: Mapping[str, Any], name: str) -> bool:
  value = body.get(name)
  if not isinstance(value, bool | None):
    raise _wrong(name, f'{name} must be true or false, got {value!r:.100}')
  return bool(value)


def _number(
  body: Mapping[str, Any],
  name: str,
  default: Any,
  *,
  kind: type = float,
  low: float,
  high: float = _LARGE,
) -> Any:
  value = body.get(name)
  if value is None:
    return default
  fits = isinstance(value, int) if kind is int else isinstance(value, int | float)
  if isinstance(value, bool) or not fits or not low <= value <= high:  # NaN never fits
    bounds = f'at least {low}' if high == _LARGE else f'from {low} to {high}'
    text = 'an integer' if kind is int else 'a number'
    raise _wrong(name, f'{name} must be {text}, {bounds}, got {str(value)[:100]}')
  return kind(value)


def _wrong(param: str, message: str, *, code: str = 'invalid_value') -> ApiError:
  message = message if message.endswith(('.', '?')) else f'{message}.'
  return ApiError(400, message, param=param, code=code)
