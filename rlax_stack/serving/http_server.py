"""The HTTP endpoint: a starlette application in OpenAI's shape, and the uvicorn server that runs it.

    GET  /health                  without a token
    GET  /metrics                 for Prometheus
    GET  /v1/models
    POST /v1/completions
    POST /v1/chat/completions

Every wait for a client has a deadline, every error is JSON in OpenAI's shape and is counted by its reason. A client
that goes away takes its samples with it.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rlax_stack.errors import FleetError, PromptTooLongError
from rlax_stack.serving.api_error import ApiError, api_error
from rlax_stack.serving.bridge import EngineBridge, fresh_seed
from rlax_stack.serving.metrics import ServingMetrics
from rlax_stack.serving.openai_requests import ApiRequest, Served, parse_json, read_request
from rlax_stack.serving.openai_responses import DONE, Answer, encode_event, encode_json
from rlax_stack.serving.ticket import DeadlineError, Ticket, Update

_LINGER = 4  # times the largest body: what is read and dropped so that a client sees its 413


class _ClientGone(Exception):
  """Nobody is there to be answered."""


class HttpApi:
  """The application.

  Args:
    served: what requests are read against.
    bridge: to the engine.
    metrics: told of every request.
    token: every path but /health asks for it; None asks for none.
    max_body_bytes: of a request.
    io_timeout_s: for a body to arrive.
  """

  def __init__(
    self,
    served: Served,
    bridge: EngineBridge,
    metrics: ServingMetrics,
    *,
    token: str | None,
    max_body_bytes: int,
    io_timeout_s: float,
  ):
    self._served, self._bridge, self._metrics = served, bridge, metrics
    self._token = None if token is None else token.encode()
    self._max_body_bytes, self._io_timeout_s = max_body_bytes, io_timeout_s

    def answered(handle: Callable[[Request], Awaitable[Response]]) -> Any:
      async def endpoint(request: Request) -> Response:
        return await self._answered(handle, request)

      return endpoint

    self.app = Starlette(
      routes=[
        Route('/health', answered(self._health)),
        Route('/metrics', answered(self._show_metrics)),
        Route('/v1/models', answered(self._models)),
        Route('/v1/completions', answered(self._completions), methods=['POST']),
        Route('/v1/chat/completions', answered(self._chat), methods=['POST']),
      ],
      exception_handlers={404: self._no_route, 405: self._no_route},
    )

  async def _answered(
    self, handle: Callable[[Request], Awaitable[Response]], request: Request
  ) -> Response:
    """Turns every error into its JSON answer and counts it."""
    try:
      if request.url.path != '/health':
        self._check_token(request)
      return await handle(request)
    except _ClientGone:
      self._metrics.refused('client_gone')
      return Response(status_code=499)  # goes nowhere
    except Exception as error:
      return self._refusal(error)

  def _refusal(self, error: Exception) -> Response:
    found = api_error(error)
    self._metrics.refused(found.code)
    headers = {} if found.retry_after_s is None else {'retry-after': str(found.retry_after_s)}
    if found.status in (408, 413):
      headers['connection'] = 'close'  # the rest of the body is not wanted
    if found.status == 401:
      headers['www-authenticate'] = 'Bearer'
    return _json(found.body(), found.status, headers)

  def _check_token(self, request: Request) -> None:
    if self._token is None:
      return
    kind, _, given = request.headers.get('authorization', '').partition(' ')
    if kind.lower() != 'bearer' or not hmac.compare_digest(given.strip().encode(), self._token):
      message = 'a token is needed: send the header "Authorization: Bearer TOKEN".'
      raise ApiError(401, message, code='invalid_api_key')

  async def _no_route(self, request: Request, error: Exception) -> Response:
    status = getattr(error, 'status_code', 404)
    message = f'there is no {request.method} {request.url.path[:100]} here.'
    return self._refusal(ApiError(status, message, code='no_route'))

  async def _health(self, request: Request) -> Response:
    view, failed = self._bridge.view, self._bridge.failure is not None
    body = {'status': 'failed' if failed else 'ok', **view._asdict()}
    return _json(body, 503 if failed else 200)

  async def _show_metrics(self, request: Request) -> Response:
    return Response(self._metrics.text(), media_type='text/plain; version=0.0.4; charset=utf-8')

  async def _models(self, request: Request) -> Response:
    model = {'id': self._served.name, 'object': 'model', 'created': 0, 'owned_by': 'rlax_stack'}
    limits = {
      'max_prompt_tokens': self._bridge.sizes.max_prompt_tokens,
      'max_tokens': self._bridge.sizes.max_new_tokens,
      'max_context': self._served.context,
      'version': self._bridge.view.version,
    }
    return _json({'object': 'list', 'data': [{**model, **limits}]})

  async def _completions(self, request: Request) -> Response:
    return await self._generate(request, chat=False)

  async def _chat(self, request: Request) -> Response:
    return await self._generate(request, chat=True)

  async def _generate(self, request: Request, *, chat: bool) -> Response:
    raw = await self._body(request)
    # Tokenizers and templates may take their time: not in the loop that serves everybody.
    async with asyncio.timeout(self._served.timeout_s):
      wanted = await asyncio.to_thread(self._read, raw, chat)
    seed = fresh_seed() if wanted.sampling.seed is None else wanted.sampling.seed
    try:
      ticket = self._bridge.submit(
        wanted.prompts,
        dataclasses.replace(wanted.sampling, seed=seed),
        count=wanted.count,
        timeout_s=wanted.timeout_s,
        streaming=wanted.stream,
        prompt_top=wanted.prompt_top,
      )
    except PromptTooLongError:
      raise
    except ValueError as error:
      raise ApiError(400, str(error)) from error
    answer = Answer(wanted, model=self._served.name, seed=seed, tokenizer=self._served.tokenizer)
    if wanted.stream:
      return _EventStream(
        self._events(ticket, wanted, answer), functools.partial(self._close, ticket)
      )
    try:
      samples = await _unless_gone(request.receive, ticket.results())
      body = await asyncio.to_thread(lambda: encode_json(answer.whole(samples, ticket.scores)))
    finally:
      self._bridge.cancel(ticket)
    self._finished(ticket, wanted, samples)
    return Response(body, media_type='application/json')

  def _read(self, raw: bytes, chat: bool) -> ApiRequest:
    return read_request(parse_json(raw), self._served, chat=chat)

  async def _events(
    self, ticket: Ticket, wanted: ApiRequest, answer: Answer
  ) -> AsyncGenerator[bytes]:
    """The server-sent events of a stream; an error on the way is the last of them."""
    last: dict[int, Update] = {}
    try:
      while updates := await ticket.updates():
        last.update((update.index, update) for update in updates)
        for chunk in answer.chunks(updates):
          yield encode_event(chunk)
      samples = [last[index] for index in sorted(last)]
      if wanted.include_usage:
        yield encode_event(answer.usage_chunk(samples))
      self._finished(ticket, wanted, samples)
      yield DONE
    except (DeadlineError, FleetError, ValueError) as error:
      found = api_error(error)
      self._metrics.refused(found.code)
      yield encode_event(found.body())

  def _finished(self, ticket: Ticket, wanted: ApiRequest, samples: list[Update]) -> None:
    self._metrics.finished(
      ticket.times,
      prompt_tokens=sum(map(len, wanted.prompts)),
      sampled=[len(sample.tokens) for sample in samples],
    )

  def _close(self, ticket: Ticket, gone: bool) -> None:
    self._bridge.cancel(ticket)
    if gone:
      self._metrics.refused('client_gone')

  async def _body(self, request: Request) -> bytes:
    """The body, of bounded size and in bounded time."""
    limit, parts, size = self._max_body_bytes, [], 0
    length = request.headers.get('content-length', '0')
    declared = int(length) if length.isdecimal() and len(length) < 16 else 0
    try:
      async with asyncio.timeout(self._io_timeout_s):
        while declared <= limit * _LINGER and size <= limit * _LINGER:
          message = await request.receive()
          if message['type'] == 'http.disconnect':
            raise _ClientGone
          size += len(message.get('body', b''))
          if size <= limit:
            parts.append(message.get('body', b''))
          if not message.get('more_body'):
            break
    except TimeoutError:
      raise ApiError(
        408, f'the body did not arrive within {self._io_timeout_s} s.', code='slow'
      ) from None
    if max(size, declared) > limit:
      raise ApiError(413, f'the body has more than {limit} bytes.', code='too_large')
    return b''.join(parts)


def _json(
  body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
  return Response(encode_json(body), status, headers, media_type='application/json')


class _EventStream(Response):
  """Sends events until they end or the client goes; then calls `close` with whether it went."""

  def __init__(self, events: AsyncGenerator[bytes], close: Callable[[bool], None]):
    super().__init__(media_type='text/event-stream', headers={'cache-control': 'no-store'})
    del self.headers['content-length']
    self._events, self._close = events, close

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    async def stream() -> None:
      head = {'type': 'http.response.start', 'status': 200, 'headers': self.raw_headers}
      await send(head)
      async with contextlib.aclosing(self._events) as events:
        async for event in events:
          await send({'type': 'http.response.body', 'body': event, 'more_body': True})
      await send({'type': 'http.response.body', 'body': b''})

    gone = False
    try:
      await _unless_gone(receive, stream())
    except _ClientGone:
      gone = True
    finally:
      self._close(gone)


async def _unless_gone(receive: Receive, work: Any) -> Any:
  """The result of `work`, a coroutine; _ClientGone where the client leaves before it."""

  async def gone() -> None:
    while (await receive())['type'] != 'http.disconnect':
      pass

  task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
  try:
    await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
      return task.result()
    raise _ClientGone
  finally:
    for each in (task, watch):
      each.cancel()
    await asyncio.gather(task, watch, return_exceptions=True)
