"""Samples to JSON in OpenAI's shape, whole or in chunks. Pure but for what a stream has sent already.

Beside OpenAI's fields every choice carries what a trajectory needs and text cannot hold: `token_ids` (a stop token and
the tokens of a stop string included), `log_probs` (of the distribution that was sampled), `raw_log_probs` (of the model
at temperature 1; OpenAI's `logprobs` show these), `versions` (of the weights, per token), `prompt_token_ids` and
`raw_finish_reason`; where the prompt is scored `prompt_version` too. All are of sampled tokens, whether the prompt is
echoed or not. The chunks of a stream carry them for their own tokens; put together they are those of the whole.
"""

import dataclasses
import itertools
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.rollout.requests import PromptScore
from rlax_stack.serving.openai_requests import ApiRequest
from rlax_stack.serving.ticket import Update
from rlax_stack.serving.token_log_probs import (
  by_text,
  echo_log_probs,
  floats,
  likeliest,
  pieces,
  prompt_log_probs,
)
from rlax_stack.types import FinishReason

_REASONS = {
  FinishReason.STOP: 'stop',
  FinishReason.STOP_STRING: 'stop',
  FinishReason.LENGTH: 'length',
}
_BROKEN = '\ufffd'  # what a tokenizer shows for bytes that are no whole character yet
DONE = b'data: [DONE]\n\n'


def visible_text(text: str, stops: Sequence[str], *, ended: bool) -> str:
  """The part of a sample's text that a client may see.

  A stop string and what follows are cut off. While the sample runs, so is an end that may turn out to be the beginning
  of a stop string, or of a character whose bytes are not all there.
  """
  cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
  if cuts:
    return text[: min(cuts)]
  if ended:
    return text
  text = text.rstrip(_BROKEN)
  held = max((_overlap(text, stop) for stop in stops), default=0)
  return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
  """Length of the longest end of `text` that `stop` begins with."""
  sizes = range(min(len(text), len(stop) - 1), 0, -1)
  return next((size for size in sizes if text.endswith(stop[:size])), 0)


def encode_event(body: dict[str, Any]) -> bytes:
  """A JSON object as one server-sent event."""
  return b'data: ' + encode_json(body) + b'\n\n'


def encode_json(body: dict[str, Any]) -> bytes:
  """JSON in UTF-8; ValueError for a number that is not finite."""
  text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
  return text.encode('utf-8', 'replace')  # a lone surrogate is no text


@dataclasses.dataclass
class _Sent:
  """What the client has of one sample."""

  tokens: int = 0
  characters: int = 0
  offset: int = 0  # characters of its tokens, each decoded alone
  begun: bool = False


class Answer:
  """Makes the answer to one request: `whole` for all samples at their end, `chunks` for a stream."""

  def __init__(self, request: ApiRequest, *, model: str, seed: int, tokenizer: Tokenizer):
    self._request, self._tokenizer = request, tokenizer
    kind = 'chat.completion' if request.chat else 'text_completion'
    prefix = 'chatcmpl' if request.chat else 'cmpl'
    self._head = {
      'id': f'{prefix}-{secrets.token_hex(12)}',
      'object': kind,
      'created': int(time.time()),
      'model': model,
      'seed': seed,
    }
    self._sent: dict[int, _Sent] = {}

  def whole(self, samples: Sequence[Update], scores: Sequence[PromptScore] = ()) -> dict[str, Any]:
    """The answer without streaming; samples in order, all ended, and scores of the prompts where they are wanted."""
    request, choices = self._request, []
    for sample in samples:
      score = scores[sample.index // request.count] if scores else None
      text = self._echo(sample) + self._text(sample)
      content = {'message': {'role': 'assistant', 'content': text}}
      choices.append(
        {
          'index': sample.index,
          **(content if request.chat else {'text': text}),
          'logprobs': self._whole_log_probs(sample, score),
          'finish_reason': self._finish_reason(sample),
          'prompt_token_ids': self._prompt(sample.index),
          **({} if request.chat else self._prompt_log_probs(score)),
          **({} if score is None else {'prompt_version': score.version}),
          **_trajectory(sample, 0),
        }
      )
    of_prompt = self._prompt_log_probs(scores[0]) if request.chat and scores else {}
    return {**self._head, 'choices': choices, **of_prompt, 'usage': self.usage(samples)}

  def chunks(self, updates: Sequence[Update]) -> Iterator[dict[str, Any]]:
    """What a stream sends for news of some samples; nothing for tokens whose text is not certain yet."""
    for sample in updates:
      sent = self._sent.setdefault(sample.index, _Sent())
      text = self._text(sample)
      if sample.finish_reason is None and len(text) <= sent.characters and sent.begun:
        continue
      yield {**self._stream_head(), 'choices': [self._delta(sample, sent, text)]}
      sent.tokens, sent.begun = len(sample.tokens), True
      sent.characters = max(sent.characters, len(text))

  def usage_chunk(self, samples: Sequence[Update]) -> dict[str, Any]:
    """The last chunk of a stream that asked for it."""
    return {**self._stream_head(), 'choices': [], 'usage': self.usage(samples)}

  def usage(self, samples: Sequence[Update]) -> dict[str, int]:
    """Tokens of prompts, each counted once, and of samples."""
    prompt = sum(map(len, self._request.prompts))
    sampled = sum(len(sample.tokens) for sample in samples)
    return {
      'prompt_tokens': prompt,
      'completion_tokens': sampled,
      'total_tokens': prompt + sampled,
    }

  def _stream_head(self) -> dict[str, Any]:
    if self._request.chat:
      return {**self._head, 'object': 'chat.completion.chunk'}
    return self._head

  def _delta(self, sample: Update, sent: _Sent, text: str) -> dict[str, Any]:
    new = text[sent.characters :]
    content: dict[str, Any] = {'text': new}
    if self._request.chat:
      role = {} if sent.begun else {'role': 'assistant'}
      content = {'delta': {**role, 'content': new}}
    choice = {
      'index': sample.index,
      **content,
      'logprobs': self._log_probs(sample, sent),
      'finish_reason': self._finish_reason(sample),
      **_trajectory(sample, sent.tokens),
    }
    if not sent.begun:
      choice['prompt_token_ids'] = self._prompt(sample.index)
    return choice

  def _prompt(self, index: int) -> list[int]:
    return self._request.prompts[index // self._request.count].tolist()

  def _echo(self, sample: Update) -> str:
    """The prompt's text, special tokens too, where the request wants it."""
    if not self._request.echo:
      return ''
    return self._tokenizer.decode(self._prompt(sample.index), skip_special_tokens=False)

  def _prompt_log_probs(self, score: PromptScore | None) -> dict[str, Any]:
    wanted = self._request.prompt_log_probs
    if score is None or wanted is None:
      return {}
    return {'prompt_logprobs': prompt_log_probs(self._tokenizer, score, wanted)}

  def _whole_log_probs(self, sample: Update, score: PromptScore | None) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of a whole choice, those of the prompt first where it is echoed."""
    if not (self._request.echo and self._request.log_probs and score is not None):
      return self._log_probs(sample, _Sent())
    before = echo_log_probs(self._tokenizer, score, self._request.sampling.top_log_probs)
    after = self._log_probs(sample, _Sent(offset=sum(map(len, before['tokens'])))) or {}
    return {name: before[name] + part if part is not None else None for name, part in after.items()}

  def _text(self, sample: Update) -> str:
    text = self._tokenizer.decode(sample.tokens.tolist())
    stops = self._request.sampling.stop_strings
    return visible_text(text, stops, ended=sample.finish_reason is not None)

  def _finish_reason(self, sample: Update) -> str | None:
    return None if sample.finish_reason is None else _REASONS[sample.finish_reason]

  def _log_probs(self, sample: Update, sent: _Sent) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of the tokens that were not sent, where the request wants them."""
    if not self._request.log_probs:
      return None
    ids = sample.tokens[sent.tokens :].tolist()
    tokens = pieces(self._tokenizer, ids)
    values = floats(sample.raw_log_probs_t[sent.tokens :])
    tops = self._likeliest(sample, sent.tokens)
    if self._request.chat:
      fields = zip(tokens, values, tops, strict=True)
      content = [
        _chat_log_prob(token, value) | {'top_logprobs': [_chat_log_prob(*pair) for pair in top]}
        for token, value, top in fields
      ]
      return {'content': content, 'refusal': None}
    offsets = list(itertools.accumulate(map(len, tokens), initial=sent.offset))
    sent.offset = offsets[-1]
    return {
      'tokens': tokens,
      'token_logprobs': values,
      'top_logprobs': list(map(by_text, tops)) if self._request.sampling.top_log_probs else None,
      'text_offset': offsets[:-1],
    }

  def _likeliest(self, sample: Update, start: int) -> list[list[tuple[str, float]]]:
    """The likeliest tokens and their log-probs from `start` on, likeliest first; none where not asked for."""
    wanted = self._request.sampling.top_log_probs
    if not wanted or sample.top_ids_t is None or sample.top_log_probs_t is None:
      return [[] for _ in sample.tokens[start:]]
    return likeliest(
      self._tokenizer, sample.top_ids_t[start:], sample.top_log_probs_t[start:], wanted
    )


def _chat_log_prob(token: str, value: float) -> dict[str, Any]:
  return {'token': token, 'logprob': value, 'bytes': list(token.encode('utf-8', 'replace'))}


def _trajectory(sample: Update, start: int) -> dict[str, Any]:
  reason = sample.finish_reason
  return {
    'raw_finish_reason': None if reason is None else reason.value,
    'token_ids': sample.tokens[start:].tolist(),
    'log_probs': floats(sample.log_probs_t[start:]),
    'raw_log_probs': floats(sample.raw_log_probs_t[start:]),
    'versions': sample.version_t[start:].tolist(),
  }
