"""The parameter server in one process: the learner publishes versions, workers pull the newest.

For: an atomic swap of whole snapshots, and the checks that come before one. Not for: transport between processes,
casting or resharding. Invariants: a reader sees one whole snapshot or another; versions only grow within a run epoch;
a snapshot never changes after publication. At most two snapshots are alive here: the newest, and the one being made.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rlax_stack.errors import FleetError

_WAIT_SLICE_S = 0.2


class TensorSpec(NamedTuple):
  """What the manifest says of one tensor."""

  shape: tuple[int, ...]
  dtype: str


class Snapshot(NamedTuple):
  """A published version. `params` must not be changed or donated."""

  version: int
  params: Any


def manifest_of(params: Any) -> dict[str, TensorSpec]:
  """Path ('layers/q_proj/kernel') to shape and dtype of each leaf; leaves may be ShapeDtypeStructs."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  return {
    _path(path): TensorSpec(tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves
  }


def check_manifest(expected: Mapping[str, TensorSpec], actual: Mapping[str, TensorSpec]) -> None:
  """Raises FleetError, naming the tensor and both shapes, where `actual` would not fit in place of `expected`."""
  absent, unknown = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
  if absent or unknown:
    raise FleetError(
      f'The weights do not fit the model here: absent {absent[:5]}, unknown {unknown[:5]}. '
      'Start learner and workers with one config.'
    )
  for path, want in expected.items():
    if want != actual[path]:
      raise FleetError(
        f'Tensor {path} is {actual[path].dtype}{list(actual[path].shape)}, but {want.dtype}{list(want.shape)} is '
        'expected here. Start learner and workers with one config.'
      )


class ParameterServer:
  """Thread-safe holder of the newest weights."""

  def __init__(self, *, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._snapshot: Snapshot | None = None
    self._manifest: dict[str, TensorSpec] | None = None
    self._epoch = 0
    self._restarted = False  # an epoch began and nothing was published in it
    self._closed: str | None = None
    self._changed = threading.Condition()

  @property
  def epoch(self) -> int:
    """Number of times that versions were allowed to start again."""
    return self._epoch

  def begin_epoch(self) -> int:
    """Allows the next `publish` to carry any version, for a learner that goes back to a checkpoint.

    What was published stays readable until then. Returns the new epoch.
    """
    with self._changed:
      self._epoch += 1
      self._restarted = True
      return self._epoch

  def publish(self, version: int, params: Any, *, copy: bool = True) -> None:
    """Makes `params` the newest weights.

    Args:
      version: larger than before in this epoch; the same version with the same content is a no-op.
      params: tree of jax or numpy arrays, of the same paths, shapes and dtypes every time.
      copy: False hands the arrays over: the caller must then never change or donate them.

    Raises:
      FleetError: the version went back, the version exists with other content, or a tensor changed shape.
    """
    manifest = manifest_of(params)
    with self._changed:
      current = self._current_of_epoch()
      if current is not None and version <= current.version:
        self._check_same(current, version, manifest, params)
        return
      if version < 0:
        raise FleetError(f'A version is at least 0, got {version}.')
      if self._manifest is not None:
        check_manifest(self._manifest, manifest)
    # The copy is made outside the lock: readers go on with the old snapshot. There is one publisher.
    snapshot = Snapshot(version, jax.tree.map(_frozen_copy, params) if copy else params)
    with self._changed:
      self._snapshot, self._manifest, self._restarted = snapshot, manifest, False
      self._changed.notify_all()

  def latest(self) -> Snapshot | None:
    """(version, params) of the newest weights, or None before the first."""
    with self._changed:
      return self._snapshot

  def wait_for(self, min_version: int, timeout_s: float) -> Snapshot:
    """The newest weights once their version is at least `min_version`.

    Raises:
      FleetError: it did not come within `timeout_s`, or the server was closed.
    """
    with self._changed:
      give_up_s = self._clock() + timeout_s
      while True:
        if self._snapshot is not None and self._snapshot.version >= min_version:
          return self._snapshot
        version = None if self._snapshot is None else self._snapshot.version
        if self._closed is not None:
          raise FleetError(
            f'No weights of version {min_version} (newest: {version}): {self._closed}.'
          )
        now_s = self._clock()
        if now_s >= give_up_s:
          raise FleetError(
            f'No weights of version {min_version} within {timeout_s:g} s; the newest are {version}.'
          )
        self._changed.wait(min(_WAIT_SLICE_S, give_up_s - now_s))

  def close(self, reason: str = 'the run ended') -> None:
    """Wakes everybody who waits."""
    with self._changed:
      self._closed = reason
      self._changed.notify_all()

  def _current_of_epoch(self) -> Snapshot | None:
    return None if self._restarted else self._snapshot

  def _check_same(
    self, current: Snapshot, version: int, manifest: Mapping[str, TensorSpec], params: Any
  ) -> None:
    if version < current.version:
      raise FleetError(
        f'Version {version} came after {current.version}. Call begin_epoch() to go back.'
      )
    same = manifest == self._manifest and all(
      np.array_equal(old, new)
      for old, new in zip(jax.tree.leaves(current.params), jax.tree.leaves(params), strict=True)
    )
    if not same:
      raise FleetError(
        f'Version {version} was published with other content. Publish under a new version.'
      )


def _path(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _frozen_copy(leaf: Any) -> Any:
  if isinstance(leaf, jax.Array):
    return leaf.copy()  # the learner donates its own buffers to the next step
  copied = np.array(leaf)
  copied.setflags(write=False)
  return copied
