"""The folder of one run: what was asked (config.json) and everything that came of it.

    <workdir>/<name>/  config.json  metrics.jsonl  samples/*.jsonl  tensorboard/  report/
    checkpoints/

Not for the content of those files. Invariant: a folder belongs to one config; opening it with
another one is refused with the differing keys, and one process at a time holds it.
"""

import fcntl
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlax_stack.errors import CheckpointError
from rlax_stack.observe.json_files import flatten, to_json_value, write_json_atomic

_MISSING = '(absent)'


class RunFolder:
  """Paths of one run. `create` makes the folder and takes possession of it.

  Args:
    workdir: the folder that holds runs, such as `runs`.
    name: the run's own folder in it; one plain path component.
  """

  def __init__(self, workdir: str | os.PathLike[str], name: str):
    if not name or name in ('.', '..') or '/' in name or '\0' in name:
      raise CheckpointError(
        f'a run name must be one plain folder name, got {name!r}. Give another --name.'
      )
    self.name = name
    self.path = Path(workdir) / name
    self.config_path = self.path / 'config.json'
    self.metrics_path = self.path / 'metrics.jsonl'
    self.samples_dir = self.path / 'samples'
    self.tensorboard_dir = self.path / 'tensorboard'
    self.report_dir = self.path / 'report'
    self.checkpoints_dir = self.path / 'checkpoints'
    self._lock: int | None = None

  def create(
    self,
    config: Any,
    *,
    allow_changes: bool = False,
    free_keys: Collection[str] = (),
    force_hint: str = 'pass --config.resume=force',
  ) -> bool:
    """Makes the folder, or takes up the one that is there when it belongs to the same config.

    Args:
      config: the resolved config, a frozen dataclass or a mapping; stored as JSON.
      allow_changes: take the folder up although the config differs (the old one is kept as
        config.N.json).
      free_keys: dotted keys that may always differ; `a.b` also frees everything under `a.b.`.
      force_hint: how a user asks for `allow_changes`, for the error message.

    Returns: True when the folder held this run already (resume if it has a checkpoint).
    Raises: CheckpointError when another process holds the folder, it holds another run's config, or
    it cannot
      be written.
    """
    try:
      for folder in (self.samples_dir, self.tensorboard_dir, self.report_dir):
        folder.mkdir(parents=True, exist_ok=True)
      self._take_lock()
      existed = self.config_path.exists()
      new = to_json_value(config)
      if existed:
        self._check_config(
          new, allow_changes=allow_changes, free_keys=free_keys, force_hint=force_hint
        )
      elif self.metrics_path.exists():
        raise CheckpointError(
          f'{self.path} holds a run without config.json, so it cannot be told whose it is. '
          'Give another --workdir or name, or remove that folder.'
        )
      write_json_atomic(self.config_path, new)
    except OSError as error:
      raise CheckpointError(
        f'cannot make or write the run folder {self.path}: {error}. Give a writable --workdir.'
      ) from error
    return existed

  def close(self) -> None:
    """Lets another process take the folder up. Safe to call twice."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def _take_lock(self) -> None:
    """A POSIX record lock: the system drops it with the process; a forked child has none of it."""
    self.close()
    descriptor = os.open(self.path / '.lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
      fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      os.close(descriptor)
      raise CheckpointError(
        f'another process is using {self.path}. Stop it, or give another --workdir or name.'
      ) from error
    except OSError:
      pass  # A file system without locks: go on without one.
    self._lock = descriptor

  def _check_config(
    self, new: Any, *, allow_changes: bool, free_keys: Collection[str], force_hint: str
  ) -> None:
    old = self._read_config()
    differences = config_differences(old, new, free_keys=free_keys)
    if not differences:
      return
    if not allow_changes:
      raise CheckpointError(
        f'{self.path} holds a run with another config:\n{format_differences(differences)}\n'
        'Give another --workdir or name to start a new run, undo the change to resume that one, '
        f'or {force_hint} to go on with the new values.'
      )
    number = 1
    while (kept := self.path / f'config.{number}.json').exists():
      number += 1
    write_json_atomic(kept, old)

  def _read_config(self) -> Any:
    try:
      return json.loads(self.config_path.read_text(encoding='utf-8'))
    except ValueError as error:
      raise CheckpointError(
        f'{self.config_path} is not JSON ({error}). Restore it, or give another --workdir or name.'
      ) from error


def config_differences(
  old: Any, new: Any, *, free_keys: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
  """Dotted keys whose values differ, as (old, new); `(absent)` stands for a key that one side
  lacks.
  """
  left, right = flatten(old), flatten(new)
  keys = [key for key in sorted(left.keys() | right.keys()) if not _is_free(key, free_keys)]
  pairs = {key: (left.get(key, _MISSING), right.get(key, _MISSING)) for key in keys}
  return {key: pair for key, pair in pairs.items() if _canonical(pair[0]) != _canonical(pair[1])}


def format_differences(differences: Mapping[str, tuple[Any, Any]]) -> str:
  """One aligned line per key: `  optimizer.learning_rate   1e-05 -> 3e-05`."""
  width = max((len(key) for key in differences), default=0)
  return '\n'.join(
    f'  {key:<{width}}  {_show(old)} -> {_show(new)}' for key, (old, new) in differences.items()
  )


def _is_free(key: str, free_keys: Collection[str]) -> bool:
  return any(key == free or key.startswith(free + '.') for free in free_keys)


def _canonical(value: Any) -> str:
  # 1 and 1.0 and True are equal in Python but not the same setting; JSON text tells them apart.
  return json.dumps(value, sort_keys=True)


def _show(value: Any) -> str:
  return value if value == _MISSING else json.dumps(value, ensure_ascii=True)
