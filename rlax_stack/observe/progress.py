"""Shows a run to the person who started it: a live panel on a terminal, plain lines in a pipe.

Not a log (absl is) and not a record (metrics are). Invariant: nothing here stops training, not even
a closed pipe; and no rich lock is ever taken while this object's own lock is held, so the two
cannot lock each other.
"""

import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from absl import logging
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rlax_stack.observe import metric_names as names
from rlax_stack.observe.metrics import to_number
from rlax_stack.observe.progress_view import ProgressView, duration, panel, plain_line

_ETA_STEPS = 20  # steps that the estimate of the remaining time looks back


class Progress:
  """A context manager; every method may be called from any thread.

  Args:
    total_steps: steps of the whole run, None when it has no fixed end.
    title: model and task, for the panel.
    mode: 'live' draws the panel, 'plain' writes lines, 'off' shows nothing, 'auto' takes the panel
      on a terminal and lines elsewhere.
    stream: where to show it; standard output by default.
    refresh_hz: redraws per second, at most 4.
    clock: a monotonic clock in seconds.
  """

  def __init__(
    self,
    *,
    total_steps: int | None = None,
    title: str = '',
    mode: str = 'auto',
    stream: TextIO | None = None,
    refresh_hz: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    output: Any = stream if stream is not None else sys.stdout
    self._off = mode == 'off'
    self._stream = _QuietStream(output)
    self._clock = clock
    self._lock = threading.Lock()
    self._title, self._total_steps = title, total_steps
    self._step = -1
    self._values: dict[str, float] = {}
    self._rewards: list[float] = []
    self._held_out: list[float] = []
    self._phase = ''
    self._start_s = self._phase_start_s = clock()
    self._arrivals: collections.deque[tuple[int, float]] = collections.deque(maxlen=_ETA_STEPS + 1)
    self._ascii_only = 'utf' not in (getattr(output, 'encoding', None) or '').lower()
    self._live: Live | None = None
    self._undo_redirect: Callable[[], None] = lambda: None
    if mode == 'live' or (mode == 'auto' and _is_terminal(output)):
      console = Console(file=self._stream, force_terminal=True)  # type: ignore[arg-type]
      self._live = Live(
        console=console,
        get_renderable=self._renderable,
        refresh_per_second=min(4.0, refresh_hz),
        redirect_stderr=_is_terminal(sys.stderr),
      )

  def __enter__(self) -> 'Progress':
    self.start()
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def start(self) -> None:
    """Begins to draw (a terminal only)."""
    if self._live is not None and not self._live.is_started:
      self._live.start(refresh=False)
      self._undo_redirect = _redirect_absl()

  def close(self) -> None:
    """Draws the last state and leaves it standing. Safe to call twice; calls after it show nothing
    live.
    """
    live, self._live = self._live, None
    with self._lock:
      self._phase = ''
    if live is not None and live.is_started:
      self._undo_redirect()
      live.stop()

  def phase(self, text: str) -> None:
    """Says what is going on, such as 'loading the model'. Before the first step each phase leaves a
    line.
    """
    with self._lock:
      now_s = self._clock()
      old, old_s, starting = self._phase, now_s - self._phase_start_s, self._step < 0
      if text == old:
        return
      self._phase, self._phase_start_s = text, now_s
      at_s = now_s - self._start_s
    if not starting:
      return
    if self._live is None:
      self._line(f'[{at_s:6.1f} s] {text}')
    elif old:
      self._line(f'{old} {duration(old_s)}')

  def update(self, step: int, values: Mapping[str, Any]) -> None:
    """A step is done. `values` as for Metrics.write; names that are not in metric_names are not
    shown.

    Raises: TypeError for a value that is not a number.
    """
    numbers = {name: to_number(name, value) for name, value in values.items()}
    with self._lock:
      now_s = self._clock()
      old, old_s, starting = self._phase, now_s - self._phase_start_s, self._step < 0
      if starting:
        self._phase = ''
      self._step, self._values = step, numbers
      if names.REWARD in numbers:
        self._rewards.append(numbers[names.REWARD])
      if names.HELD_OUT in numbers:
        self._held_out.append(numbers[names.HELD_OUT])
      self._arrivals.append((step, now_s))
      view = self._view(now_s)
    if self._live is None:
      self._line(plain_line(view))
    elif starting and old:
      self._line(f'{old} {duration(old_s)}')

  def held_out(self, step: int, accuracy: float) -> None:
    """An evaluation on the held-out problems is done (step 0 is before training)."""
    with self._lock:
      self._held_out.append(float(accuracy))
    self._line(f'step={step} held_out={accuracy:.3f}')

  def restore(self, *, rewards: Sequence[float], held_out: Sequence[float]) -> None:
    """Takes up the history of a resumed run, so that its trend starts where the run started."""
    with self._lock:
      self._rewards[:0] = [float(value) for value in rewards]
      self._held_out[:0] = [float(value) for value in held_out]

  def message(self, text: str) -> None:
    """One line that stays, above the panel; control characters of `text` are made visible."""
    self._line(''.join(char if char.isprintable() else ascii(char)[1:-1] for char in text))

  def _line(self, text: str) -> None:
    if self._off:
      return
    live = self._live
    if live is not None:
      live.console.print(Text(text), soft_wrap=True)
    else:
      self._stream.write(text + '\n')
      self._stream.flush()

  def _renderable(self) -> RenderableType:
    with self._lock:
      view = self._view(self._clock())
    return panel(view, ascii_only=self._ascii_only)

  def _view(self, now_s: float) -> ProgressView:
    return ProgressView(
      title=self._title,
      step=self._step,
      total_steps=self._total_steps,
      values=dict(self._values),
      rewards=tuple(self._rewards),
      held_out=tuple(self._held_out),
      elapsed_s=now_s - self._start_s,
      eta_s=self._eta_s(),
      phase=self._phase,
      phase_s=now_s - self._phase_start_s,
    )

  def _eta_s(self) -> float | None:
    """The remaining steps at the mean pace of the last ones, evaluations included."""
    if self._total_steps is None or len(self._arrivals) < 2:
      return None
    (first_step, first_s), (last_step, last_s) = self._arrivals[0], self._arrivals[-1]
    if last_step <= first_step:
      return None
    return (self._total_steps - last_step) * (last_s - first_s) / (last_step - first_step)


class _QuietStream:
  """A text stream whose reader may go away: from then on what is written is dropped."""

  def __init__(self, stream: TextIO):
    self._stream = stream
    self.encoding = getattr(stream, 'encoding', None) or 'utf-8'

  def write(self, text: str) -> int:
    try:
      self._stream.write(text.encode(self.encoding, 'backslashreplace').decode(self.encoding))
    except (OSError, ValueError):  # a broken pipe, a closed file
      pass
    return len(text)

  def flush(self) -> None:
    try:
      self._stream.flush()
    except (OSError, ValueError):
      pass

  def isatty(self) -> bool:
    return _is_terminal(self._stream)

  def fileno(self) -> int:
    return self._stream.fileno()


def _is_terminal(stream: Any) -> bool:
  try:
    return stream.isatty() and os.environ.get('TERM', '') not in ('', 'dumb')
  except (AttributeError, ValueError):
    return False


def _redirect_absl() -> Callable[[], None]:
  """Lets absl's handler, which keeps the stream it found at import, write through rich's standard
  error.

  Only when rich has replaced standard error and absl writes there. Returns: what undoes it.
  """
  handler, proxy = logging.get_absl_handler().python_handler, sys.stderr
  original = getattr(proxy, 'rich_proxied_file', None)
  if original is None or handler.stream is not original:
    return lambda: None
  handler.setStream(proxy)

  def undo() -> None:
    if handler.stream is proxy:
      handler.setStream(original)

  return undo
