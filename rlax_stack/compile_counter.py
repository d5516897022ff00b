"""Counts the programs that XLA is asked for, so that a run can hold that nothing is recompiled
after its start.

Listens to jax's monitoring events (the same names in jax 0.10 and 0.12). One program request is one
event; a
request that the persistent cache answered is counted apart. Invariant: a repeated call of a
compiled function changes no count.
"""

import threading
from typing import NamedTuple

import jax

_REQUEST_EVENT = '/jax/core/compile/backend_compile_duration'
_HIT_EVENT = '/jax/compilation_cache/cache_hits'


class CompileCount(NamedTuple):
  """Counts since a counter started, or between two marks.

  programs: requests for an executable. cache_hits: those answered from the persistent cache on
    disk.
  seconds: wall seconds spent on the requests. names: the requested functions, in order.
  """

  programs: int
  cache_hits: int
  seconds: float
  names: tuple[str, ...]

  @property
  def compiled(self) -> int:
    """Programs that XLA really compiled."""
    return self.programs - self.cache_hits


class CompileCounter:
  """Counts while it is open; a context manager, or `start()` and `stop()`. Thread-safe."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._open = False
    self._cache_hits = 0
    self._seconds = 0.0
    self._names: list[str] = []

  def start(self) -> 'CompileCounter':
    """Begins to count, from whatever was counted before. Does nothing when open."""
    if not self._open:
      self._open = True
      jax.monitoring.register_event_duration_secs_listener(self._on_duration)
      jax.monitoring.register_event_listener(self._on_event)
    return self

  def stop(self) -> None:
    """Stops counting and lets jax forget the listeners. Does nothing when closed."""
    if self._open:
      self._open = False
      jax.monitoring.unregister_event_duration_listener(self._on_duration)
      jax.monitoring.unregister_event_listener(self._on_event)

  @property
  def count(self) -> CompileCount:
    """Everything counted so far; also a mark for `since`."""
    with self._lock:
      names = tuple(self._names)
      return CompileCount(len(names), self._cache_hits, self._seconds, names)

  def since(self, mark: CompileCount) -> CompileCount:
    """What was counted after `mark`, an earlier `count` of this counter."""
    now = self.count
    return CompileCount(
      now.programs - mark.programs,
      now.cache_hits - mark.cache_hits,
      now.seconds - mark.seconds,
      now.names[mark.programs :],
    )

  def __enter__(self) -> 'CompileCounter':
    return self.start()

  def __exit__(self, *unused: object) -> None:
    self.stop()

  def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == _REQUEST_EVENT:
      with self._lock:
        self._seconds += duration_secs
        self._names.append(str(kwargs.get('fun_name', 'unknown')))

  def _on_event(self, event: str, **kwargs: str | int) -> None:
    if event == _HIT_EVENT:
      with self._lock:
        self._cache_hits += 1
