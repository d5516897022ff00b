"""JetStream's gRPC service: `Decode` and `HealthCheck` of `jetstream_proto.Orchestrator`, by generic handlers.

Sampling parameters are not on that wire: they are those of the config. Token ids are taken as they are and come back
whole, a sampled stop token included, so a trajectory is token-exact; a text gets the model's begin token unless
`has_bos` says that it has one. LoRA adapters are refused.
"""

import asyncio
import dataclasses
import hmac
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
import numpy as np

from rlax_stack.config import ServeSection
from rlax_stack.errors import ConfigError
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.serving import jetstream_messages as messages
from rlax_stack.serving.api_error import api_error
from rlax_stack.serving.bridge import EngineBridge, fresh_seed
from rlax_stack.serving.metrics import ServingMetrics
from rlax_stack.serving.openai_requests import Served
from rlax_stack.serving.openai_responses import visible_text
from rlax_stack.serving.ticket import Update

_CODES = {
  401: grpc.StatusCode.UNAUTHENTICATED,
  400: grpc.StatusCode.INVALID_ARGUMENT,
  429: grpc.StatusCode.RESOURCE_EXHAUSTED,
  503: grpc.StatusCode.UNAVAILABLE,
  504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def make_grpc_server(
  served: Served,
  bridge: EngineBridge,
  metrics: ServingMetrics,
  *,
  section: ServeSection,
  token: str | None,
) -> grpc.aio.Server:
  """The server, on its port and not yet started.

  Args:
    served: tokenizer, sampling and the longest time of a request.
    bridge: to the engine.
    metrics: told of every call.
    section: address and limits.
    token: what `authorization: Bearer TOKEN` in the metadata must hold; None asks for none.

  Raises:
    ConfigError: the port is taken.
  """
  orchestrator = Orchestrator(
    served, bridge, metrics, token=token, io_timeout_s=section.io_timeout_s
  )
  longest_ms = int(section.request_timeout_s * 1000)
  options = (
    # What a client does not read is let go of when its connection ends; no connection lives for ever.
    ('grpc.max_connection_age_ms', longest_ms),
    ('grpc.max_connection_age_grace_ms', longest_ms),
    ('grpc.max_receive_message_length', section.max_body_bytes),
    ('grpc.server_handshake_timeout_ms', int(section.io_timeout_s * 1000)),
    ('grpc.so_reuseport', 0),
  )
  server = grpc.aio.server(options=options, maximum_concurrent_rpcs=section.max_connections)
  server.add_generic_rpc_handlers((orchestrator.handlers(),))
  host = f'[{section.host}]' if ':' in section.host else section.host
  try:
    server.add_insecure_port(f'{host}:{section.grpc_port}')
  except RuntimeError as error:
    raise ConfigError(
      f'cannot listen on config.serve.host={section.host}, grpc_port={section.grpc_port}. '
      'Choose another port.'
    ) from error
  return server


class Orchestrator:
  """The two methods; arguments as of `make_grpc_server`."""

  def __init__(
    self,
    served: Served,
    bridge: EngineBridge,
    metrics: ServingMetrics,
    *,
    token: str | None,
    io_timeout_s: float,
  ):
    self._served, self._bridge, self._metrics = served, bridge, metrics
    self._token = None if token is None else token.encode()
    self._io_timeout_s = io_timeout_s

  def handlers(self) -> grpc.GenericRpcHandler:
    """For `add_generic_rpc_handlers`."""
    decode = grpc.unary_stream_rpc_method_handler(
      self._decode,
      request_deserializer=messages.DecodeRequest.FromString,
      response_serializer=messages.DecodeResponse.SerializeToString,
    )
    health = grpc.unary_unary_rpc_method_handler(
      self._health,
      request_deserializer=messages.HealthCheckRequest.FromString,
      response_serializer=messages.HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(
      messages.SERVICE, {'Decode': decode, 'HealthCheck': health}
    )

  async def _health(self, request: Any, context: Any) -> Any:
    return messages.HealthCheckResponse(is_live=self._bridge.failure is None)

  async def _decode(self, request: Any, context: Any) -> None:
    await self._check_token(context)
    try:
      prompt = await asyncio.to_thread(self._prompt, request)
      ticket = self._submit(request, prompt, context.time_remaining())
    except ValueError as error:  # PromptTooLongError too
      await self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, 'invalid', str(error))
    except Exception as error:
      await self._refuse(context, error)
    decoded = _Decoded(
      self._served.tokenizer,
      self._served.defaults.stop_strings,
      with_text=request.WhichOneof('content') == 'text_content',
      count=len(ticket.requests),
    )
    try:
      while updates := await ticket.updates():
        async with asyncio.timeout(self._io_timeout_s):
          await context.write(decoded.response(updates))
    except TimeoutError:
      self._bridge.cancel(ticket)  # first: the status can be sent only when the client reads again
      await self._abort(
        context, grpc.StatusCode.DEADLINE_EXCEEDED, 'slow', 'the client stopped reading.'
      )
    except asyncio.CancelledError:
      self._metrics.refused('client_gone')
      raise
    except Exception as error:
      await self._refuse(context, error)
    finally:
      self._bridge.cancel(ticket)
    self._metrics.finished(ticket.times, prompt_tokens=len(prompt), sampled=decoded.sizes)

  def _prompt(self, request: Any) -> np.ndarray:
    if request.lora_adapter_id:
      raise ValueError(f'no LoRA adapter is served, got {request.lora_adapter_id[:100]!r}.')
    kind = request.WhichOneof('content')
    if kind == 'token_content':
      return np.asarray(request.token_content.token_ids, np.int32)
    tokenizer = self._served.tokenizer
    tokens = tokenizer.encode(request.text_content.text)
    if tokenizer.bos_id is not None and not request.has_bos:
      tokens = np.concatenate([np.asarray([tokenizer.bos_id], np.int32), tokens])
    return tokens

  def _submit(self, request: Any, prompt: np.ndarray, left_s: float | None) -> Any:
    defaults, longest_s = self._served.defaults, self._served.timeout_s
    room = max(1, min(defaults.max_tokens, self._served.context - len(prompt)))
    sampling = dataclasses.replace(
      defaults, max_tokens=request.max_tokens or room, seed=fresh_seed()
    )
    return self._bridge.submit(
      [prompt],
      sampling,
      count=max(1, request.num_samples),
      timeout_s=longest_s if left_s is None else min(longest_s, left_s),
      streaming=True,
    )

  async def _check_token(self, context: Any) -> None:
    if self._token is None:
      return
    given = dict(context.invocation_metadata()).get('authorization', '')
    kind, _, shown = str(given).partition(' ')
    if kind.lower() != 'bearer' or not hmac.compare_digest(shown.strip().encode(), self._token):
      message = 'a token is needed: send the metadata "authorization: Bearer TOKEN".'
      await self._abort(context, grpc.StatusCode.UNAUTHENTICATED, 'invalid_api_key', message)

  async def _refuse(self, context: Any, error: Exception) -> NoReturn:
    found = api_error(error)
    code = _CODES.get(found.status, grpc.StatusCode.INTERNAL)
    await self._abort(context, code, found.code, found.message)

  async def _abort(self, context: Any, code: Any, reason: str, message: str) -> NoReturn:
    self._metrics.refused(reason)
    await context.abort(code, message)
    raise RuntimeError('abort does not return')


class _Decoded:
  """Turns news of samples into responses: every sample has its place in each, with what is new of it."""

  def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, with_text: bool, count: int):
    self._tokenizer, self._stops, self._with_text = tokenizer, stops, with_text
    self.sizes, self._characters = [0] * count, [0] * count

  def response(self, updates: Sequence[Update]) -> Any:
    samples = [messages.Sample() for _ in self.sizes]
    for update in updates:
      samples[update.index] = self._sample(update)
    return messages.DecodeResponse(stream_content=messages.StreamContent(samples=samples))

  def _sample(self, update: Update) -> Any:
    start, reason, text = self.sizes[update.index], update.finish_reason, ''
    if self._with_text:
      whole = self._tokenizer.decode(update.tokens.tolist())
      shown = visible_text(whole, self._stops, ended=reason is not None)
      text = shown[self._characters[update.index] :]
      self._characters[update.index] += len(text)
    self.sizes[update.index] = len(update.tokens)
    return messages.Sample(
      text=text,
      token_ids=update.tokens[start:].tolist(),
      log_probs=update.log_probs_t[start:].tolist(),
      raw_log_probs=update.raw_log_probs_t[start:].tolist(),
      versions=update.version_t[start:].tolist(),
      finish_reason=reason.value if reason is not None else '',
    )
