"""Metrics of a run: one dict of numbers per step, to every sink, without ever holding training up.

Each sink has a daemon thread and a bounded queue. A sink that fails is counted and logged once; one
that hangs loses records, which are counted too. Not for text, pictures or per-token values.
Invariant: `write` neither blocks on a sink nor raises for one.
"""

import dataclasses
import numbers
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from rlax_stack.observe.metric_sinks import JsonlSink, TensorBoardSink

_QUEUE_SIZE = 4096


class Metrics:
  """Writes each record to every sink.

  Args:
    sinks: name -> a function that opens the sink: an object with `write(step, time_s, values)`,
      `flush()` and `close()`. It is called in the sink's own thread, so a sink that cannot even
      open costs nothing.
    wall_clock: seconds since 1970, for the records' `time_s`.
  """

  def __init__(
    self, sinks: Mapping[str, Callable[[], Any]], *, wall_clock: Callable[[], float] = time.time
  ):
    self._wall_clock = wall_clock
    self._workers = [_SinkWorker(name, open_sink) for name, open_sink in sinks.items()]

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Records `values` (name -> a Python or numpy number, or an array of no dimensions) for `step`.

    Raises: TypeError for a value that is not a number: a mistake of the caller, not a fault of a
    sink.
    """
    record = {name: to_number(name, value) for name, value in values.items()}
    now_s = self._wall_clock()
    for worker in self._workers:
      worker.put((int(step), now_s, record))

  def flush(self, *, timeout_s: float = 5.0) -> bool:
    """Waits until what was written so far has reached the files. False when a sink did not make it
    in time.
    """
    deadline_s = time.monotonic() + timeout_s
    return all([worker.flush(deadline_s) for worker in self._workers])

  def close(self, *, timeout_s: float = 5.0) -> None:
    """Flushes and ends every sink; a sink that hangs is left behind after `timeout_s`. Safe to call
    twice.
    """
    deadline_s = time.monotonic() + timeout_s
    for worker in self._workers:
      worker.close(deadline_s)

  @property
  def dropped(self) -> dict[str, int]:
    """Records that a sink lost, by sink name."""
    return {worker.name: worker.dropped for worker in self._workers}

  def __enter__(self) -> 'Metrics':
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()


def open_metrics(
  *,
  jsonl_path: Path | None,
  tensorboard_dir: Path | None = None,
  restored_step: int = -1,
  extra_sinks: Mapping[str, Callable[[], Any]] | None = None,
) -> Metrics:
  """Metrics to a JSON-lines file and to tensorboard event files.

  Args:
    restored_step: the step that a checkpoint restored: records of later steps, from an earlier life
      of the run, are removed, so that a resumed run has each step once. -1 starts the files afresh.

  The files are opened in the sinks' threads: `flush()` before reading them back.
  """
  sinks: dict[str, Callable[[], Any]] = {}
  if jsonl_path is not None:
    sinks['jsonl'] = lambda: JsonlSink(jsonl_path, restored_step=restored_step)
  if tensorboard_dir is not None:
    sinks['tensorboard'] = lambda: TensorBoardSink(tensorboard_dir, restored_step=restored_step)
  return Metrics(sinks | dict(extra_sinks or {}))


def to_number(name: str, value: Any) -> int | float:
  """A Python int or float of a number or an array of no dimensions. Raises TypeError for anything
  else.
  """
  if getattr(value, 'ndim', None) == 0 and hasattr(value, 'item'):
    value = value.item()
  if isinstance(value, numbers.Integral):  # bool included
    return int(value)
  if isinstance(value, numbers.Real):
    return float(value)
  raise TypeError(
    f'a metric must be one number, got {name}={value!r} of type {type(value).__name__}.'
  )


@dataclasses.dataclass(frozen=True)
class _Flush:
  done: threading.Event


class _SinkWorker:
  """One sink, its thread and its queue."""

  def __init__(self, name: str, open_sink: Callable[[], Any]):
    self.name = name
    self.dropped = 0
    self._lock = threading.Lock()
    self._closed = False
    self._logged = False
    self._open_sink = open_sink
    self._queue: queue.Queue[Any] = queue.Queue(_QUEUE_SIZE)
    self._thread = threading.Thread(target=self._run, name=f'metrics-{name}', daemon=True)
    self._thread.start()

  def put(self, item: tuple[int, float, Mapping[str, float]]) -> None:
    if self._closed:
      self._lose('it is closed')
      return
    try:
      self._queue.put_nowait(item)
    except queue.Full:
      self._lose('it does not keep up')

  def flush(self, deadline_s: float) -> bool:
    if not self._thread.is_alive():
      return self._closed
    event = threading.Event()
    try:
      self._queue.put(_Flush(event), timeout=max(0.0, deadline_s - time.monotonic()))
    except queue.Full:
      return False
    return event.wait(max(0.0, deadline_s - time.monotonic()))

  def close(self, deadline_s: float) -> None:
    if self._closed:
      return
    self._closed = True
    try:
      self._queue.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
    except queue.Full:
      return
    self._thread.join(max(0.0, deadline_s - time.monotonic()))

  def _run(self) -> None:
    sink = self._guard(self._open_sink)
    while (item := self._queue.get()) is not None:
      if isinstance(item, _Flush):
        if sink is not None:
          self._guard(sink.flush)
        item.done.set()
      elif sink is None:
        self._lose('it could not be opened')
      else:
        self._guard(sink.write, *item)
    if sink is not None:
      self._guard(sink.close)

  def _guard(self, function: Callable[..., Any], *args: Any) -> Any:
    try:
      return function(*args)
    except Exception as error:  # whatever a sink raises must not reach training
      self._lose(f'{type(error).__name__}: {error}')
      return None

  def _lose(self, reason: str) -> None:
    with self._lock:
      self.dropped += 1
      first, self._logged = not self._logged, True
    if first:
      logging.warning(
        'The metrics sink %r lost a record (%s); training goes on.', self.name, reason
      )
