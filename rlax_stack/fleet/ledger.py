"""The account of every issued trajectory: where each one ended, exactly once.

For: proving that nothing is lost or trained twice. Not for: holding trajectories, leases or time.
Invariant: issued = in flight + the sum of all outcomes, at every step. Memory is bounded by the open
groups: group ids are issued in sequence, so an id below `next_group_id` that is not open is finished.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from rlax_stack.errors import CheckpointError, FleetError


class Outcome(enum.StrEnum):
  """The one end of a trajectory."""

  TRAINED = 'trained'
  BASELINE = 'baseline'  # a greedy sample that trained ones were compared with
  DROPPED_STALE = 'dropped_stale'  # too old at consumption
  DROPPED_FAILED = 'dropped_failed'  # its reward, its worker or too much of its group failed
  DROPPED_FILTERED = 'dropped_filtered'  # the learner chose not to train on it
  CANCELLED = 'cancelled'  # the run ended first


# These two may end a trajectory that no worker delivered; the others speak of one that was.
_WITHOUT_DELIVERY = (Outcome.DROPPED_FAILED, Outcome.CANCELLED)


@dataclasses.dataclass(kw_only=True)
class _OpenGroup:
  """A group with at least one trajectory in flight."""

  attempt: int
  outcomes: list[Outcome | None]  # by sample index; None while in flight
  delivered: set[int] = dataclasses.field(default_factory=set)


class Ledger:
  """Counts every trajectory (group id, sample index) to exactly one `Outcome`. Not thread-safe: its owner locks."""

  def __init__(self):
    self._next_group_id = 0
    self._issued = 0
    self._duplicates = 0
    self._closed = dict.fromkeys(Outcome, 0)
    self._open: dict[int, _OpenGroup] = {}

  @property
  def next_group_id(self) -> int:
    """The id that the next `issue` must use."""
    return self._next_group_id

  @property
  def duplicates(self) -> int:
    """Deliveries of trajectories that had been delivered, or finished, before."""
    return self._duplicates

  def issue(self, group_id: int, group_size: int) -> None:
    """Opens a group of `group_size` trajectories, attempt 0. Ids come in sequence, else FleetError."""
    if group_id != self._next_group_id:
      raise FleetError(
        f'Group ids are issued in sequence: expected {self._next_group_id}, got {group_id}.'
      )
    if group_size < 1:
      raise FleetError(f'A group has at least one trajectory, got {group_size=}.')
    self._open[group_id] = _OpenGroup(attempt=0, outcomes=[None] * group_size)
    self._next_group_id += 1
    self._issued += group_size

  def reissue(self, group_id: int) -> int:
    """Starts the next attempt at an open group that nobody delivered; returns the attempt's number."""
    group = self._open_group(group_id)
    if group.delivered:
      raise FleetError(
        f'Group {group_id} was delivered in attempt {group.attempt}; it cannot be issued again.'
      )
    group.attempt += 1
    return group.attempt

  def deliver(self, group_id: int, sample_index: int, *, attempt: int) -> bool:
    """Notes that a trajectory came back; True the first time.

    A repeated delivery, one of an earlier attempt and one of a finished group are duplicates: counted, False.

    Raises:
      FleetError: the group, the attempt or the sample was never issued.
    """
    if self.is_finished(group_id):
      self._duplicates += 1
      return False
    group = self._open_group(group_id)
    self._check_sample(group_id, group, sample_index)
    if attempt > group.attempt:
      raise FleetError(
        f'Group {group_id} is at attempt {group.attempt}; attempt {attempt} was never issued.'
      )
    if attempt < group.attempt or sample_index in group.delivered:
      self._duplicates += 1
      return False
    group.delivered.add(sample_index)
    return True

  def finish(self, group_id: int, sample_index: int, outcome: Outcome) -> None:
    """Ends one trajectory.

    Raises:
      FleetError: it has ended before, was never issued, or `outcome` needs a delivery that never came.
    """
    group = self._open_group(group_id)
    self._check_sample(group_id, group, sample_index)
    ended = group.outcomes[sample_index]
    if ended is not None:
      raise FleetError(
        f'Trajectory {group_id}/{sample_index} already ended as {ended}; it cannot become {outcome}.'
      )
    if sample_index not in group.delivered and outcome not in _WITHOUT_DELIVERY:
      raise FleetError(
        f'Trajectory {group_id}/{sample_index} was never delivered; it cannot become {outcome}.'
      )
    group.outcomes[sample_index] = outcome
    ends = [end for end in group.outcomes if end is not None]
    if len(ends) == len(group.outcomes):
      for end in ends:
        self._closed[end] += 1
      del self._open[group_id]

  def finish_group(self, group_id: int, outcome: Outcome) -> int:
    """Ends every trajectory of the group that is still in flight; returns how many."""
    in_flight = [i for i, ended in enumerate(self._open_group(group_id).outcomes) if ended is None]
    for sample_index in in_flight:
      self.finish(group_id, sample_index, outcome)
    return len(in_flight)

  def is_finished(self, group_id: int) -> bool:
    """Whether every trajectory of the group has ended."""
    return 0 <= group_id < self._next_group_id and group_id not in self._open

  def open_groups(self) -> tuple[int, ...]:
    """Ids of groups with a trajectory in flight, ascending."""
    return tuple(sorted(self._open))

  def attempt(self, group_id: int) -> int:
    """The running attempt at an open group."""
    return self._open_group(group_id).attempt

  def counts(self) -> dict[str, int]:
    """Trajectories: 'issued', 'in_flight' and one entry for each outcome."""
    ends = dict(self._closed)
    in_flight = 0
    for group in self._open.values():
      for ended in group.outcomes:
        if ended is None:
          in_flight += 1
        else:
          ends[ended] += 1
    return {'issued': self._issued, 'in_flight': in_flight} | {
      end.value: n for end, n in ends.items()
    }

  def check(self) -> None:
    """Raises FleetError where the sums do not close or an open group has nothing in flight."""
    counts = self.counts()
    ended = sum(counts[outcome] for outcome in Outcome)
    if counts['issued'] != ended + counts['in_flight']:
      raise FleetError(
        f'The ledger does not close: {counts}. This is a bug; keep the workdir and report it.'
      )
    for group_id, group in self._open.items():
      if group_id >= self._next_group_id or all(group.outcomes):
        raise FleetError(
          f'Open group {group_id} is not consistent: {group}. This is a bug; please report it.'
        )

  def state(self) -> dict[str, Any]:
    """JSON value. Open groups are kept as in flight whole: what they had delivered is not in a checkpoint."""
    return {
      'next_group_id': self._next_group_id,
      'duplicates': self._duplicates,
      'closed': {outcome.value: n for outcome, n in self._closed.items()},
      'open': [[i, len(group.outcomes), group.attempt] for i, group in sorted(self._open.items())],
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Replaces everything by `state()` of another ledger; CheckpointError where it is malformed."""
    try:
      opened = {
        int(i): _OpenGroup(attempt=int(attempt), outcomes=[None] * int(size))
        for i, size, attempt in state['open']
      }
      closed = {outcome: int(state['closed'][outcome.value]) for outcome in Outcome}
      next_group_id, duplicates = int(state['next_group_id']), int(state['duplicates'])
    except (KeyError, TypeError, ValueError) as error:
      raise CheckpointError(
        f'The ledger in the checkpoint is malformed ({error!r}). Use an older one.'
      ) from error
    if any(n < 0 for n in closed.values()) or any(not 0 <= i < next_group_id for i in opened):
      raise CheckpointError(
        f'The ledger in the checkpoint is inconsistent: {state}. Use an older one.'
      )
    self._next_group_id, self._duplicates = next_group_id, duplicates
    self._closed, self._open = closed, opened
    self._issued = sum(closed.values()) + sum(len(group.outcomes) for group in opened.values())

  def _open_group(self, group_id: int) -> _OpenGroup:
    if group_id not in self._open:
      was = 'has ended' if self.is_finished(group_id) else 'was never issued'
      raise FleetError(f'Group {group_id} {was}; open groups: {list(self.open_groups())[:16]}.')
    return self._open[group_id]

  def _check_sample(self, group_id: int, group: _OpenGroup, sample_index: int) -> None:
    if not 0 <= sample_index < len(group.outcomes):
      raise FleetError(
        f'Group {group_id} has {len(group.outcomes)} trajectories; there is no sample {sample_index}.'
      )
