"""The coordinator: leases groups to workers, bounds staleness, and gives the learner its batches.

For: one learner and any number of workers that may die at any time. Not for: generating, scoring or holding weights.
Invariants: every trajectory is accounted for once (`ledger.py`); a group is leased only when it can still be consumed
within `max_staleness` versions (`admission.py`); only the newest lease of a group may deliver it (`group_table.py`).
No call blocks past its deadline. One batch is consumed per published version.

The order of calls of the learner, for versions v = 0, 1, ...:
`on_published(v)`, `next_batch(v)`, train, `mark_trained(batch)`, publish v + 1, and so on; `state()` belongs into
the checkpoint of v + 1 after `mark_trained` (before or after `on_published(v + 1)`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from rlax_stack.errors import CheckpointError, FleetError, RewardError
from rlax_stack.fleet import delivery
from rlax_stack.fleet.admission import AdmissionRule
from rlax_stack.fleet.group_table import LEASED, PENDING, READY, TAKEN, GroupTable
from rlax_stack.fleet.lease import Finished, Lease, Wait
from rlax_stack.fleet.ledger import Outcome
from rlax_stack.fleet.reward_guard import RewardGuard
from rlax_stack.fleet.worker_watch import WorkerWatch
from rlax_stack.types import Group, Prompt, Trajectory

_WAIT_SLICE_S = 0.2  # blocked calls look at the injected clock at least this often


class Coordinator:
  """Thread-safe. Times are seconds of `clock`; see the module for the order of calls."""

  def __init__(
    self,
    next_prompt: Callable[[], Prompt],
    *,
    group_size: int,
    groups_per_batch: int,
    max_staleness: int,
    lease_timeout_s: float,
    min_group_size: int | Mapping[str, int] = 2,
    groups_in_flight: int = 0,
    greedy: bool = False,
    max_attempts: int = 5,
    max_reward_failure_fraction: float = 0.01,
    reward_failure_window: int = 256,
    max_failed_groups_in_row: int = 8,
    no_worker_warning_s: float = 15.0,
    prompt_state: Callable[[], Any] | None = None,
    history: Any = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Makes an idle coordinator; nothing is leased before the first `on_published`.

    Args:
      next_prompt: gives the next prompt, StopIteration at the end; called under the lock, one call at a time.
      group_size: samples per group.
      groups_per_batch: groups per training batch.
      max_staleness: in versions; 0 is strictly on-policy.
      lease_timeout_s: a lease not extended for so long is given to another worker.
      groups_in_flight: groups leased or ready at most; 0 admits all that `max_staleness` does.
      min_group_size: a group with fewer usable samples is dropped whole; by role where there are several.
      greedy: every group has one sample more, at temperature 0, as `Group.greedy`; without it a group is dropped.
      max_attempts: leases of one group that may fail before it is dropped.
      max_reward_failure_fraction: of the last `reward_failure_window` verdicts; more stops the run.
      reward_failure_window: in samples; the fraction counts once so many were scored.
      max_failed_groups_in_row: so many groups in which every verdict failed stop the run.
      no_worker_warning_s: the learner warns where no group is leased and no worker was heard for so long.
      history: of the prompts (`data.prompt_history`), given to strategies with every lease; None for none.
      prompt_state: the prompt iterator's state as a JSON value, read in one instant with the rest by `state`.
      clock: monotonic seconds.

    Raises:
      ValueError: a size or a limit that cannot work.
    """
    self._rule = AdmissionRule(
      groups_per_batch=groups_per_batch,
      max_staleness=max_staleness,
      groups_in_flight=groups_in_flight,
    )
    self._next_prompt, self._prompt_state, self._clock = next_prompt, prompt_state, clock
    self._guard = RewardGuard(
      max_failure_fraction=max_reward_failure_fraction,
      window=reward_failure_window,
      max_failed_groups_in_row=max_failed_groups_in_row,
    )
    self._table = GroupTable(
      group_size=group_size,
      min_group_size=min_group_size,
      max_staleness=max_staleness,
      max_attempts=max_attempts,
      lease_timeout_s=lease_timeout_s,
      greedy=greedy,
      history=history,
    )
    self._version: int | None = None
    self._batch_taken = self._exhausted = False
    self._closed: str | None = None
    self._error: BaseException | None = None
    self._workers = WorkerWatch(
      warning_s=no_worker_warning_s, forget_s=2 * lease_timeout_s, clock=clock
    )
    self._batch_staleness: list[int] = []
    self._max_staleness_seen, self._learner_wait_s = 0, 0.0
    self._changed = threading.Condition()

  def lease(self, worker_id: str, *, timeout_s: float = 0.0) -> Lease | Wait | Finished:
    """Asks for a group; blocks up to `timeout_s` while there is none to give."""
    with self._changed:
      give_up_s = self._clock() + timeout_s
      while True:
        self._workers.heard(worker_id)
        self._expire_leases()
        answer = self._try_lease(worker_id)
        now_s = self._clock()
        if not isinstance(answer, Wait) or now_s >= give_up_s:
          return answer
        self._changed.wait(min(_WAIT_SLICE_S, give_up_s - now_s))

  def extend(self, lease: Lease) -> Lease:
    """Heartbeat: the same lease with a new deadline; StaleLeaseError where it is no longer the worker's."""
    with self._changed:
      self._workers.heard(lease.worker_id)
      return self._table.extend(lease, now_s=self._clock())

  def deliver(self, lease: Lease, trajectories: Sequence[Trajectory]) -> bool:
    """Takes all scored samples of a leased group; True where they were new.

    A repeated delivery, or one after the group or the run has ended, changes nothing (counted): False.

    Raises:
      StaleLeaseError: the group was leased again since, or the lease is of another coordinator (counted).
      FleetError: the trajectories are not the whole group; see `delivery.check_delivery`.
      RewardError: too many verdicts failed; the run stops and the learner gets this error too.
    """
    with self._changed:
      self._workers.heard(lease.worker_id)
      if self._closed is not None or self._table.is_duplicate(lease):
        self._table.counters['duplicates'] += 1
        return False
      self._table.deliver(lease, trajectories)
      self._changed.notify_all()
      failures = [
        reason for reason in map(delivery.reward_failure, trajectories) if reason is not None
      ]
      try:
        self._guard.add(len(trajectories), failures)
      except RewardError as error:
        self._close(error)
        raise
      return True

  def fail(self, lease: Lease, reason: str, *, retry: bool = True) -> None:
    """Gives a lease back. The group is leased again, up to `max_attempts`, unless `retry` is False; then it is dropped.

    Raises:
      StaleLeaseError: the lease is no longer the worker's (counted).
    """
    with self._changed:
      self._workers.heard(lease.worker_id)
      if self._table.is_duplicate(lease):
        return
      self._table.give_back(lease, retry=retry)
      logging.warning('Worker %s gave back group %d: %s', lease.worker_id, lease.group_id, reason)
      self._changed.notify_all()

  def on_published(self, version: int) -> None:
    """Tells that the weights of `version` can be had. Versions only grow; the same one again is a no-op."""
    with self._changed:
      if version < 0 or (self._version is not None and version < self._version):
        raise FleetError(
          f'Versions only grow: {version} came after {self._version}. Restore a checkpoint to go back.'
        )
      if version != self._version:
        self._version, self._batch_taken = version, False
      self._changed.notify_all()

  def next_batch(self, version: int, *, timeout_s: float) -> list[Group]:
    """Groups to train on at `version`, in order of group id; blocks until they are there.

    With max_staleness 0 these are exactly the groups admitted for this version, the same in every run. Above it, those
    that finished first, except that a group in its last version is waited for. A group that is too old is dropped
    whole, counted and replaced.

    Returns:
      groups_per_batch groups; an empty list where the prompts are used up or the coordinator was closed.

    Raises:
      FleetError: nothing for `timeout_s`, or the wrong version.
      Exception: whatever `close` was given.
    """
    with self._changed:
      if version != self._version or self._batch_taken:
        taken = ', whose batch was taken' if self._batch_taken else ''
        raise FleetError(
          f'next_batch({version}) at version {self._version}{taken}. Call on_published({version}) first.'
        )
      start_s = self._clock()
      try:
        return self._await_batch(version, start_s, timeout_s)
      finally:
        self._learner_wait_s += self._clock() - start_s

  def likely_batch(self, version: int) -> list[Group] | None:
    """What `next_batch(version)` would give if it were asked now, None where it would wait; nothing is taken."""
    with self._changed:
      chosen = self._table.choose(self._rule, version)
      return None if chosen is None else self._table.look_at(chosen)

  def mark_trained(self, groups: Sequence[Group]) -> None:
    """Ends the trajectories of a batch as trained; FleetError where one is not the learner's."""
    with self._changed:
      self._table.end_taken(groups, Outcome.TRAINED)

  def mark_filtered(self, groups: Sequence[Group]) -> None:
    """Ends the trajectories of a batch, or of part of one, that the learner did not train on (say a skipped step)."""
    with self._changed:
      self._table.end_taken(groups, Outcome.DROPPED_FILTERED)

  def close(self, error: BaseException | None = None) -> None:
    """Ends all waiting: `next_batch` raises the first error given, workers get Finished. The ledger stays as it is."""
    with self._changed:
      self._close(error)

  def cancel_in_flight(self) -> int:
    """Ends every open trajectory as cancelled, for the last account of a run that will not go on; returns how many."""
    with self._changed:
      return self._table.cancel(self._table.ledger.open_groups())

  @property
  def is_finished(self) -> bool:
    """Whether no worker will get work again: closed, failed, or the prompts are used up."""
    with self._changed:
      return self._closed is not None or self._is_dry()

  def state(self) -> dict[str, Any]:
    """JSON value, all of one instant: version, ledger, prompts of unfinished groups, prompt iterator."""
    with self._changed:
      return {
        'version': self._version,
        # A batch that was taken and not trained is done again after a restore.
        'batch_taken': self._batch_taken and not self._table.ids(TAKEN),
        'groups': self._table.state(),
        'guard': self._guard.state(),
        'max_staleness_seen': self._max_staleness_seen,
        'prompt_state': None if self._prompt_state is None else self._prompt_state(),
      }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes over `state()`: unfinished groups are leased again with their ids and prompts, before any new prompt.

    The caller restores the prompt iterator to `state['prompt_state']` first.

    Raises:
      CheckpointError: the state is malformed; the coordinator must not be used then.
    """
    with self._changed:
      try:
        self._table.restore(state['groups'])
        self._guard.restore(state['guard'])
        self._max_staleness_seen = int(state['max_staleness_seen'])
        self._version, self._batch_taken = state['version'], bool(state['batch_taken'])
      except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
          f'The coordinator state is malformed ({error!r}). Use an older checkpoint.'
        ) from error
      self._changed.notify_all()

  def counts(self) -> dict[str, int]:
    """Trajectories by where they ended: `Ledger.counts`."""
    with self._changed:
      return self._table.ledger.counts()

  def check(self) -> None:
    """Raises FleetError where the account does not close."""
    with self._changed:
      self._table.check()

  def metrics(self) -> dict[str, float]:
    """Figures of this moment and counts of the whole run, by name: trajectories where the name does not say groups."""
    with self._changed:
      batch = self._batch_staleness or [0]
      return self._table.metrics() | {
        'fleet/staleness_mean': sum(batch) / len(batch),  # of the last batch, in versions
        'fleet/staleness_max': float(max(batch)),
        'fleet/staleness_max_ever': float(self._max_staleness_seen),
        'fleet/reward_failures': float(self._guard.failed_total),
        'fleet/no_worker_warnings': float(self._workers.num_warnings),
        'fleet/learner_wait_s': self._learner_wait_s,
        'fleet/workers': float(len(self._workers)),
      }

  # What follows runs under the lock.

  def _close(self, error: BaseException | None) -> None:
    if self._error is None:
      self._error = error
    if self._closed is None or error is not None:
      self._closed = 'the run ended' if self._error is None else f'the run failed: {self._error}'
    self._changed.notify_all()

  def _expire_leases(self) -> None:
    expired = self._table.expire(self._clock())
    for lease in expired:
      logging.warning(
        'The lease of group %d by worker %s ran out.', lease.group_id, lease.worker_id
      )
    if expired:
      self._changed.notify_all()

  def _try_lease(self, worker_id: str) -> Lease | Wait | Finished:
    if self._closed is not None:
      return Finished(reason=self._closed)
    if self._version is None:
      return Wait(reason='no weights are published yet')
    next_batch_version = self._version + int(self._batch_taken)
    places = self._rule.capacity(version=self._version, next_batch_version=next_batch_version)
    active = len(self._table.ids(LEASED, READY))
    if active >= places:
      return Wait(reason=f'{active} groups are active, all that {self._rule} admits')
    group_id = self._table.first_pending()
    if group_id is None:
      group_id = self._issue_next()
    if group_id is None:
      reason = f'the prompts are used up; {active} groups are active'
      return Finished(reason=reason) if self._is_dry() else Wait(reason=reason)
    return self._table.grant(group_id, worker_id, version=self._version, now_s=self._clock())

  def _issue_next(self) -> int | None:
    if self._exhausted:
      return None
    try:
      prompt = self._next_prompt()
    except StopIteration:
      self._exhausted = True
      self._changed.notify_all()
      return None
    except Exception as error:
      # A broken source stops the run, whichever worker happened to ask.
      self._close(error)
      raise
    return self._table.issue(prompt)

  def _is_dry(self) -> bool:
    """No batch can be filled any more."""
    return (
      self._exhausted and len(self._table.ids(PENDING, LEASED, READY)) < self._rule.groups_per_batch
    )

  def _await_batch(self, version: int, start_s: float, timeout_s: float) -> list[Group]:
    while True:
      if self._error is not None:
        raise self._error
      self._expire_leases()
      if self._table.drop_stale(version):
        self._changed.notify_all()
      chosen = self._table.choose(self._rule, version)
      if self._closed is not None:
        return []
      if chosen is not None:
        return self._take(chosen, version)
      if self._is_dry():
        self._cancel_leftovers()
        return []
      now_s = self._clock()
      if now_s - start_s >= timeout_s:
        raise FleetError(
          f'No batch for version {version} within {timeout_s:g} s: {self._situation()}.'
        )
      if not self._table.ids(LEASED):
        self._workers.warn_if_quiet(self._situation())
      self._changed.wait(min(_WAIT_SLICE_S, start_s + timeout_s - now_s))

  def _take(self, group_ids: list[int], version: int) -> list[Group]:
    groups = self._table.take(group_ids)
    self._batch_taken = True
    self._batch_staleness = [version - t.oldest_version for t in delivery.all_trajectories(groups)]
    self._max_staleness_seen = max(self._max_staleness_seen, *self._batch_staleness)
    self._changed.notify_all()
    return groups

  def _cancel_leftovers(self) -> None:
    leftovers = self._table.ids(PENDING, LEASED, READY)  # not what the learner holds
    self._table.cancel(leftovers)
    logging.info('Prompts are used up; cancelled %d groups that fill no batch.', len(leftovers))
    self._changed.notify_all()

  def _situation(self) -> str:
    table = self._table
    return (
      f'{len(table.ids(READY))} of {self._rule.groups_per_batch} groups ready, {len(table.ids(LEASED))} leased, '
      f'{len(table.ids(PENDING))} to be leased again, {len(self._workers)} workers heard lately'
    )
