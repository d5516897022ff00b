"""One learner in several processes: each is given the same batches and puts its own devices' rows on them.

Not for rollout or the run around the learner. Invariant: no process waits for another without a deadline; inside a
collective it is that of the signs of life (peer_watch.py).
"""

import atexit
import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the only way to its barrier and its store of words
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from rlax_stack.errors import FleetError
from rlax_stack.learner.peer_watch import PeerWatch, jax_timeout_s

_meetings = itertools.count()
_watches: list[PeerWatch] = []  # of the one job that this process is in, if any


def start(address: str, *, processes: int, index: int, deadline_s: int = 300) -> None:
  """Joins this process to the job; to be called before a device is touched.

  Args:
    address: host:port of process 0, which keeps the job together.
    processes: of the job.
    index: of this process, from 0.
    deadline_s: for the others to come, for a dead one to be noticed and named, and for all to leave.

  Raises:
    FleetError: the job does not come together in time.
  """
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  try:
    jax.distributed.initialize(
      address,
      processes,
      index,
      initialization_timeout=deadline_s,
      heartbeat_timeout_seconds=jax_timeout_s(deadline_s),
      shutdown_timeout_seconds=deadline_s,
    )
  except RuntimeError as error:
    raise FleetError(
      f'process {index} of {processes} did not find the others at {address} within {deadline_s} s: {error}. Check that '
      'all are started with this address, which is that of process 0.'
    ) from error
  client = distributed.global_state.client
  watch = PeerWatch(client, processes=processes, index=index, deadline_s=deadline_s)
  atexit.register(watch.stop)
  watch.start()
  _watches.append(watch)


@contextlib.contextmanager
def naming_who_is_gone() -> Iterator[None]:
  """Around what runs collectives: one that fails because a process is gone fails with its name.

  Raises:
    FleetError: in the place of the device's error, where a process gave no sign of life for `start`'s deadline.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    for watch in _watches:
      if watch.wait_for_gone():
        raise FleetError(f'{watch.message()} ({_first_line(error)})') from error
    raise


def place(tree: Any, shardings: Any) -> Any:
  """Arrays of the host on the mesh; a process reads only what belongs to its own devices.

  Args:
    tree: numpy arrays, or arrays of this process, of global shape.
    shardings: one for all, or a tree of them.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, shardings)

  def one(x, sharding):
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

  if isinstance(shardings, Sharding):
    return jax.tree.map(lambda x: one(x, shardings), tree)
  return jax.tree.map(one, tree, shardings)


def fetch(array: Any) -> np.ndarray:
  """The whole array on the host of every process."""
  if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def digest(tree: Any) -> str:
  """A word that is the same for equal arrays; '' in a job of one process, where there is nobody to compare with."""
  if jax.process_count() == 1:
    return ''
  found = hashlib.blake2b(digest_size=8)
  for leaf in jax.tree.leaves(tree):
    found.update(np.ascontiguousarray(leaf).tobytes())
  return found.hexdigest()


def meet(name: str, *, word: str = '', deadline_s: float) -> None:
  """Waits until every process is here with the same word; returns at once in a job of one process.

  Args:
    name: what the meeting is for, for messages.
    word: what all should agree on.
    deadline_s: for the others to come.

  Raises:
    FleetError: somebody did not come, or came with another word; it says who.
  """
  if jax.process_count() == 1:
    return
  client: Any = distributed.global_state.client
  own, everybody = jax.process_index(), range(jax.process_count())
  number = next(_meetings)
  folder = f'rlax_stack/{number}'
  problem = None
  try:
    client.key_value_set(f'{folder}/{own}', f'={word}')
    client.wait_at_barrier(folder, int(deadline_s * 1000))
  except RuntimeError as error:
    problem = error
  words = _words(client, folder)
  if problem is not None:
    missing = ', '.join(str(i) for i in everybody if i not in words)
    who = missing if words else '0, which keeps the job together,'
    raise FleetError(
      f'{name}: process {who or "?"} of {len(everybody)} did not come within {deadline_s:g} s '
      f'({_first_line(problem)}). Look at its log, then start all processes again from the last checkpoint.'
    ) from problem
  others = [str(i) for i in everybody if words[i] != words[own]]
  if others:
    raise FleetError(
      f'{name}: process {", ".join(others)} has another batch than process {own}. Give every process of the learner '
      'the same groups in the same order.'
    )
  if number:  # nobody reads the meeting before this one any more
    client.key_value_delete(f'rlax_stack/{number - 1}/{own}')


def _words(client: Any, folder: str) -> dict[int, str]:
  """What those who came said, by process; empty where process 0, which keeps it, is gone."""
  try:
    found = client.key_value_dir_get(folder)
  except RuntimeError:
    return {}
  return {int(key.rsplit('/', 1)[1]): word for key, word in found}


def _first_line(error: Exception) -> str:
  return str(error).splitlines()[0] if str(error) else repr(error)
