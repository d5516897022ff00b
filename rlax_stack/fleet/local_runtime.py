"""The embedded runtime: a rollout worker in a thread beside the learner.

For: start, stop within a deadline, and taking an error from the worker to the learner. Not for: what a worker does.
"""

import threading
import time
from collections.abc import Callable

from absl import logging

from rlax_stack.errors import FleetError, StaleLeaseError
from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.fleet.parameter_server import ParameterServer

# A worker leases, generates, scores and delivers until the coordinator answers Finished or the event is set. It uses
# deadlines of at most a second or so in its blocking calls, so that it sees the event; what it raises stops the run.
Worker = Callable[[Coordinator, ParameterServer, threading.Event], None]


class LocalRuntime:
  """Runs `worker(coordinator, parameter_server, stop_event)` in one thread; also a context manager."""

  def __init__(
    self,
    worker: Worker,
    *,
    coordinator: Coordinator,
    parameter_server: ParameterServer,
    name: str = 'rollout-0',
  ):
    self._worker, self._coordinator, self._parameter_server = worker, coordinator, parameter_server
    self._stop_event = threading.Event()
    self._error: BaseException | None = None
    # A daemon, so that a worker that hangs cannot keep the process alive after `stop` has given up on it.
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)

  def start(self) -> None:
    """Starts the thread; once."""
    self._thread.start()

  def stop(self, timeout_s: float = 30.0) -> None:
    """Asks the worker to end and joins it; safe to call again.

    Raises:
      FleetError: it did not end within `timeout_s`.
      Exception: what the worker raised (`next_batch` may have raised it before).
    """
    self._stop_event.set()
    self._coordinator.close()
    self._parameter_server.close()
    if self._thread.ident is None:
      return
    start_s = time.monotonic()
    self._thread.join(timeout_s)
    if self._thread.is_alive():
      raise FleetError(
        f'Worker {self._thread.name} did not end within {timeout_s:g} s. The process can exit; its work is lost.'
      )
    logging.info('Worker %s ended in %.2f s.', self._thread.name, time.monotonic() - start_s)
    error, self._error = self._error, None
    if error is not None:
      raise error

  def is_alive(self) -> bool:
    """Whether the thread runs."""
    return self._thread.is_alive()

  def __enter__(self) -> 'LocalRuntime':
    self.start()
    return self

  def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
    try:
      self.stop()
    except Exception as stop_error:
      # The learner's own error says more, and is often this very one.
      if error is None:
        raise
      if error is not stop_error:
        logging.exception('Stopping worker %s failed as well.', self._thread.name)

  def _run(self) -> None:
    try:
      self._worker(self._coordinator, self._parameter_server, self._stop_event)
      if not self._stop_event.is_set() and not self._coordinator.is_finished:
        raise FleetError(f'Worker {self._thread.name} returned while the run goes on.')
    except (
      BaseException
    ) as error:  # the border of a thread: whatever it is, the learner must hear of it
      if self._stop_event.is_set() and isinstance(error, FleetError | StaleLeaseError):
        return  # the end of the run interrupted a blocking call
      self._error = error
      self._coordinator.close(error)
