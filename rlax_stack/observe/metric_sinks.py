"""Where metrics go: a JSON-lines file and tensorboard event files.

A sink may raise whatever its library raises; `metrics.Metrics` counts that. Invariant: after a
resume no step occurs twice.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlax_stack.observe.json_files import dumps_line, keep_lines_up_to


class JsonlSink:
  """One JSON object a line: `{"step": 3, "time_s": ..., "reward/mean": 0.5}`; NaN and infinities
  are null.

  Args:
    restored_step: lines of later steps, and a torn last line, are removed first. -1 empties the
      file.
  """

  def __init__(self, path: Path, *, restored_step: int = -1):
    keep_lines_up_to(path, restored_step)
    self._file = open(path, 'a', encoding='utf-8', buffering=1)  # held until close

  def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
    """Appends one line, which reaches the system at once."""
    numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
    self._file.write(dumps_line({'step': step, 'time_s': round(time_s, 3)} | numbers))

  def flush(self) -> None:
    """Hands everything to the system."""
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


class TensorBoardSink:
  """Scalars as tensorboard event files, without TensorFlow.

  Uses tensorboardX's synchronous event writer: its SummaryWriter has a thread and a bounded queue
  of its own, and waits for ever once that thread has died of a full disk.

  Args:
    restored_step: tensorboard is told to forget later steps of an earlier life of the run.
  """

  def __init__(self, folder: Path, *, restored_step: int = -1):
    # Imported here: a broken or missing tensorboardX then costs this sink and nothing else.
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2, summary_pb2

    events: Any = event_pb2  # generated at import, so a type checker sees nothing in them
    summaries: Any = summary_pb2
    self._event = events.Event
    self._summary = summaries.Summary
    folder.mkdir(parents=True, exist_ok=True)
    resumed = any(folder.glob('events.out.tfevents.*'))
    # The library names files by the second; the suffix keeps two lives of a run in one second
    # apart.
    self._writer = event_file_writer.EventsWriter(str(folder / 'events'), f'.{time.time_ns()}')
    if resumed:
      start = events.SessionLog(status=events.SessionLog.START)
      self._writer.write_event(events.Event(step=restored_step + 1, session_log=start))
    self.flush()

  def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
    """Adds one event with a scalar per value, and hands it to the system."""
    scalars = [
      self._summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()
    ]
    event = self._event(wall_time=time_s, step=step, summary=self._summary(value=scalars))
    self._writer.write_event(event)
    self.flush()

  def flush(self) -> None:
    """Writes what is queued."""
    self._writer.flush()

  def close(self) -> None:
    """Writes what is queued and closes the file."""
    self._writer.close()
