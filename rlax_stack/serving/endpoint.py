"""One served model: the engine's thread and the servers before it, started and ended together."""

import asyncio
import contextlib
import ipaddress
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn

from rlax_stack.config import ServeSection
from rlax_stack.errors import ConfigError, FleetError
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.serving.bridge import EngineBridge
from rlax_stack.serving.connection import guarded_protocol
from rlax_stack.serving.grpc_server import make_grpc_server
from rlax_stack.serving.http_server import HttpApi
from rlax_stack.serving.metrics import ServingMetrics
from rlax_stack.serving.openai_requests import Served
from rlax_stack.types import SamplingParams

_KEEP_ALIVE_S = 30  # an idle connection is kept for the client's next request
_SEND_BUFFER = 2**18  # bytes of a connection in the kernel
_SHORTEST_TOKEN = 16  # characters


def check_token(host: str, token: str | None, variable: str) -> None:
  """Raises ConfigError where `host` may be reached from elsewhere and there is no token to ask for."""
  if token is not None and len(token) < _SHORTEST_TOKEN:
    raise ConfigError(
      f'the token in {variable} has {len(token)} characters. Use {_SHORTEST_TOKEN} or more.'
    )
  if token is None and not _is_loopback(host):
    raise ConfigError(
      f'config.serve.host={host} can be reached from other machines, so clients must show a token. '
      f'Put one into the environment variable {variable}, or listen on 127.0.0.1.'
    )


def _is_loopback(host: str) -> bool:
  try:
    found = {info[4][0] for info in socket.getaddrinfo(host, None)}
  except OSError as error:
    raise ConfigError(f'config.serve.host={host} is no address of this machine: {error}.') from None
  return all(ipaddress.ip_address(str(address).partition('%')[0]).is_loopback for address in found)


def bind(host: str, port: int) -> socket.socket:
  """A socket that has the address and does not listen yet; ConfigError where it cannot be had."""
  try:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      # Inherited by every connection: what a client does not read is not kept in megabytes.
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
      listener.bind(address)
    except OSError:
      listener.close()
      raise
  except OSError as error:
    raise ConfigError(
      f'cannot listen on config.serve.host={host}, port={port}: {error.strerror}. Choose another port.'
    ) from error
  return listener


class _Uvicorn(uvicorn.Server):
  """Leaves signals to the program that runs it."""

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    yield


class Endpoint:
  """Serves a scheduler that has weights.

  Args:
    scheduler: owned by the endpoint from now on.
    model, sizes: of its engine.
    tokenizer: of the model.
    name: the model's name for clients.
    defaults: sampling where a request is silent.
    section: addresses and limits.
    token: what clients must show; None for a loopback address without one.
    listener: of HTTP, from `bind`; closed at the end of `run`.
  """

  def __init__(
    self,
    scheduler: Scheduler,
    *,
    model: ModelConfig,
    sizes: EngineConfig,
    tokenizer: Tokenizer,
    name: str,
    defaults: SamplingParams,
    section: ServeSection,
    token: str | None,
    listener: socket.socket,
  ):
    check_token(section.host, token, section.token_variable)
    self._section, self._token, self._listener = section, token, listener
    self._loop: asyncio.AbstractEventLoop | None = None
    self._stop = asyncio.Event()
    self.metrics = ServingMetrics(slots=sizes.slots, view=lambda: self.bridge.view)
    self.bridge = EngineBridge(
      scheduler,
      model=model,
      sizes=sizes,
      max_waiting=section.max_waiting,
      observer=self.metrics,
      on_failure=self.stop,
    )
    self.served = Served(
      name=name,
      tokenizer=tokenizer,
      defaults=defaults,
      context=model.max_context,
      timeout_s=section.request_timeout_s,
    )
    self._api = HttpApi(
      self.served,
      self.bridge,
      self.metrics,
      token=token,
      max_body_bytes=section.max_body_bytes,
      io_timeout_s=section.io_timeout_s,
    )

  def stop(self) -> None:
    """From any thread: takes no new requests, ends those on their way and lets `run` return."""
    if self._loop is not None and not self._loop.is_closed():
      self._loop.call_soon_threadsafe(self._stop.set)

  async def run(self, ready: Callable[[int], None]) -> None:
    """Serves until `stop`.

    Args:
      ready: called with the port of HTTP when requests are answered.

    Raises:
      ConfigError: the port of gRPC is taken.
      FleetError: the engine died.
    """
    section, self._loop = self._section, asyncio.get_running_loop()
    with self._listener as listener:
      async with self._grpc_server():
        self.bridge.start()
        server = _Uvicorn(self._uvicorn_config())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(self._stop.wait())
        try:
          ready(listener.getsockname()[1])
          await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
          server.should_exit = True
          await serving
        finally:
          stopping.cancel()
      await asyncio.to_thread(self.bridge.stop, section.drain_timeout_s)
    if self.bridge.failure is not None:
      raise FleetError('the engine has stopped; the log says why.') from self.bridge.failure

  @contextlib.asynccontextmanager
  async def _grpc_server(self) -> AsyncIterator[None]:
    """Serves gRPC meanwhile, where the config wants it."""
    if not self._section.grpc_port:
      yield
      return
    server = make_grpc_server(
      self.served, self.bridge, self.metrics, section=self._section, token=self._token
    )
    await server.start()
    try:
      yield
    finally:
      await server.stop(self._section.drain_timeout_s)

  def _uvicorn_config(self) -> uvicorn.Config:
    section = self._section
    protocol = guarded_protocol(
      io_timeout_s=section.io_timeout_s,
      max_connections=section.max_connections,
      refused=self.metrics.refused,
    )
    return uvicorn.Config(
      self._api.app,
      http=protocol,
      ws='none',
      lifespan='off',
      log_config=None,
      log_level='error',
      access_log=False,
      proxy_headers=False,
      server_header=False,
      timeout_keep_alive=_KEEP_ALIVE_S,
      timeout_graceful_shutdown=math.ceil(section.drain_timeout_s),
    )
