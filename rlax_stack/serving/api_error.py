"""What clients are told of what goes wrong, whoever raised it."""

from typing import Any

from absl import logging

from rlax_stack.errors import FleetError, PromptTooLongError
from rlax_stack.serving.bridge import OverloadedError
from rlax_stack.serving.ticket import DeadlineError


class ApiError(Exception):
  """What a client is told: HTTP status and the fields of OpenAI's error object."""

  def __init__(self, status: int, message: str, *, param: str | None = None, code: str = 'invalid'):
    super().__init__(message)
    self.status, self.message, self.param, self.code = status, message, param, code
    self.retry_after_s: int | None = None

  def body(self) -> dict[str, Any]:
    """The JSON object of the answer."""
    kind = 'invalid_request_error' if self.status < 500 and self.status != 429 else 'server_error'
    kind = 'rate_limit_error' if self.status == 429 else kind
    error = {'message': self.message, 'type': kind, 'param': self.param, 'code': self.code}
    return {'error': error}


def api_error(error: Exception) -> ApiError:
  """What a client is told of an error; one that nobody expected is logged and told as 500."""
  if isinstance(error, ApiError):
    return error
  if isinstance(error, OverloadedError):
    found = ApiError(429, str(error), code='overloaded')
    found.retry_after_s = error.retry_after_s
    return found
  if isinstance(error, DeadlineError | TimeoutError):
    return ApiError(504, str(error) or 'it took too long.', code='deadline_exceeded')
  if isinstance(error, PromptTooLongError):
    return ApiError(400, str(error), param='prompt', code='context_length_exceeded')
  if isinstance(error, FleetError):
    return ApiError(503, str(error), code='engine_stopped')
  logging.error('A request failed.', exc_info=error)
  return ApiError(500, 'the server failed on this request; its log says why.', code='internal')
