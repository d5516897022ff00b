"""HTTP connections that cannot be held open: uvicorn's protocol with deadlines for what it waits for without one.

A client must send the head of a request, and take what was sent to it, within `io_timeout_s`; connections beyond
`max_connections` are answered 503 and closed. Bodies and answers have their deadlines in http_server.py.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_FULL_BODY = (
  b'{"error":{"message":"too many connections are open. Try again later.",'
  b'"type":"server_error","param":null,"code":"connections"}}'
)
_FULL = (
  b'HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n'
  b'content-type: application/json\r\ncontent-length: %d\r\n\r\n' % len(_FULL_BODY)
) + _FULL_BODY


def guarded_protocol(
  *, io_timeout_s: float, max_connections: int, refused: Callable[[str], None]
) -> type[asyncio.Protocol]:
  """The protocol class of one server.

  Args:
    io_timeout_s: see above.
    max_connections: see above.
    refused: told why a connection was ended: 'slow', 'connections' or 'malformed'.
  """

  class Guarded(H11Protocol):
    """One connection."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
      super().connection_made(transport)
      if len(self.connections) > max_connections:
        refused('connections')
        transport.write(_FULL)
        transport.close()
      else:
        self._head = self.loop.call_later(io_timeout_s, self._give_up)

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      # IDLE: what has come is not a whole head yet. The time runs from its first byte.
      if self.conn.their_state is not h11.IDLE:
        self._head = _cancelled(self._head)
      elif self._head is None:
        self._head = self.loop.call_later(io_timeout_s, self._give_up)

    def pause_writing(self) -> None:
      super().pause_writing()
      if self._stalled is None:
        self._stalled = self.loop.call_later(io_timeout_s, self._give_up)

    def resume_writing(self) -> None:
      super().resume_writing()
      self._stalled = _cancelled(self._stalled)

    def on_response_complete(self) -> None:
      super().on_response_complete()
      if self.transport.is_closing():
        # Closing waits for the client to read the rest; not for ever.
        self.loop.call_later(io_timeout_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
      refused('malformed')
      super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
      self._head, self._stalled = _cancelled(self._head), _cancelled(self._stalled)
      super().connection_lost(exc)

    def _give_up(self) -> None:
      refused('slow')
      self.transport.abort()

  return Guarded


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
  if timer is not None:
    timer.cancel()
