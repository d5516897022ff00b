"""The unfinished groups and their leases, in step with the ledger.

For: what happens to one group from issue to end. Not for: locks, waiting, versions of the learner (`coordinator.py`).
A group is pending (to be leased again), leased, ready (delivered) or taken (handed to the learner); then it is gone.
"""

import collections
import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rlax_stack.errors import CheckpointError, FleetError, StaleLeaseError
from rlax_stack.fleet import delivery
from rlax_stack.fleet.admission import AdmissionRule
from rlax_stack.fleet.lease import Lease, prompt_from_json, prompt_to_json
from rlax_stack.fleet.ledger import Ledger, Outcome
from rlax_stack.types import Group, Past, Prompt, Trajectory

PENDING, LEASED, READY, TAKEN = 'pending', 'leased', 'ready', 'taken'
DROP_REASONS = ('stale', 'too_few_usable', 'no_baseline', 'worker_failed', 'cancelled')


@dataclasses.dataclass(kw_only=True)
class _Record:
  """One unfinished group."""

  prompt: Prompt
  is_new: bool = False  # never leased
  status: str = PENDING
  failures: int = 0  # leases given back or expired
  last_version: int = -1


class GroupTable:
  """Not thread-safe: the coordinator locks. `now_s` is always the coordinator's clock."""

  def __init__(
    self,
    *,
    group_size: int,
    min_group_size: int | Mapping[str, int],
    max_staleness: int,
    max_attempts: int,
    lease_timeout_s: float,
    greedy: bool = False,
    history: Any = None,
  ):
    sizes = min_group_size if isinstance(min_group_size, Mapping) else {'': min_group_size}
    if min(*sizes.values(), max_attempts) < 1 or lease_timeout_s <= 0:
      raise ValueError(
        'min_group_size, max_attempts and lease_timeout_s must be positive, '
        f'got {min_group_size=}, {max_attempts=}, {lease_timeout_s=}.'
      )
    if group_size < sum(sizes.values()):
      raise ValueError(
        f'group_size must be at least min_group_size, got {group_size=} and {min_group_size=}.'
      )
    self._group_size, self._min_sizes = group_size, dict(sizes)
    self._max_staleness, self._max_attempts = max_staleness, max_attempts
    self._lease_timeout_s, self._greedy = lease_timeout_s, greedy
    self._history = history
    self._records: dict[int, _Record] = {}
    self._leases: dict[int, Lease] = {}  # the newest of each group, expired or used ones included
    self._groups: dict[int, Group] = {}  # the delivered ones
    # Tokens of another table, say of the process before a crash, never match.
    self._fence, self._num_leases = secrets.token_hex(8), 0
    self.ledger = Ledger()
    self.ready: list[int] = []  # group ids in order of completion
    self.counters: collections.Counter[str] = collections.Counter()
    self.dropped_groups: collections.Counter[str] = collections.Counter()

  def issue(self, prompt: Prompt) -> int:
    """Opens the next group; it is pending."""
    group_id = self.ledger.next_group_id
    self.ledger.issue(group_id, self._group_size + self._greedy)
    self._records[group_id] = _Record(prompt=prompt, is_new=True)
    return group_id

  def first_pending(self) -> int | None:
    """The lowest id that waits to be leased again."""
    return next(iter(self.ids(PENDING)), None)

  def last_versions(self) -> dict[int, int]:
    """Last version in which each active (leased or ready) group can be consumed."""
    return {i: r.last_version for i, r in self._records.items() if r.status in (LEASED, READY)}

  def ids(self, *statuses: str) -> list[int]:
    """Groups in one of the statuses, ascending."""
    return sorted(i for i, record in self._records.items() if record.status in statuses)

  def grant(self, group_id: int, worker_id: str, *, version: int, now_s: float) -> Lease:
    """Leases a pending group under a new fencing token."""
    record = self._records[group_id]
    attempt = 0 if record.is_new else self.ledger.reissue(group_id)
    self._num_leases += 1
    record.is_new, record.status, record.last_version = False, LEASED, version + self._max_staleness
    lease = self._leases[group_id] = Lease(
      group_id=group_id,
      prompt=record.prompt,
      group_size=self._group_size,
      greedy=self._greedy,
      attempt=attempt,
      token=f'{self._fence}/{self._num_leases}',
      worker_id=worker_id,
      deadline_s=now_s + self._lease_timeout_s,
      min_version=version,
      last_version=record.last_version,
      past=Past() if self._history is None else self._history.of(record.prompt.prompt_id),
    )
    return lease

  def extend(self, lease: Lease, *, now_s: float) -> Lease:
    """Moves the deadline; an expired lease that nobody took yet comes back to life."""
    self._fenced(lease).status = LEASED
    extended = dataclasses.replace(
      self._leases[lease.group_id], deadline_s=now_s + self._lease_timeout_s
    )
    self._leases[lease.group_id] = extended
    return extended

  def is_duplicate(self, lease: Lease) -> bool:
    """Whether this lease's group was delivered already under it, or has ended."""
    if not lease.token.startswith(self._fence):
      return False
    if lease.group_id in self._groups:
      return self._leases[lease.group_id].token == lease.token
    return self.ledger.is_finished(lease.group_id)

  def deliver(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
    """Accounts for a delivered group: ready, or dropped where too few samples, or the greedy one, are usable."""
    record = self._fenced(lease)
    group_id = lease.group_id
    delivery.check_delivery(group_id, lease.num_samples, trajectories)
    for trajectory in trajectories:
      self.ledger.deliver(group_id, trajectory.sample_index, attempt=lease.attempt)
    samples = [t for t in trajectories if t.sample_index < self._group_size]
    greedy = next((t for t in trajectories if t.sample_index >= self._group_size), None)
    group = delivery.make_group(group_id, record.prompt, samples, self._min_sizes, greedy)
    if group is None:
      self.drop(group_id, Outcome.DROPPED_FAILED, 'too_few_usable')
      return
    if greedy is not None and not delivery.is_usable(greedy):
      self.drop(group_id, Outcome.DROPPED_FAILED, 'no_baseline')
      return
    usable = delivery.all_trajectories([group])
    for index in {t.sample_index for t in samples} - {t.sample_index for t in usable}:
      self.ledger.finish(group_id, index, Outcome.DROPPED_FAILED)
    self._groups[group_id] = group
    record.last_version = min(t.oldest_version for t in usable) + self._max_staleness
    record.status = READY
    self.ready.append(group_id)

  def give_back(self, lease: Lease, *, retry: bool) -> None:
    """Makes a leased group pending again, or drops it after too many failures."""
    record = self._fenced(lease)
    self.counters['failed_leases'] += 1
    self._leases.pop(lease.group_id)  # what was given back cannot be delivered
    self._lease_failed(lease.group_id, record, retry=retry)

  def expire(self, now_s: float) -> list[Lease]:
    """Makes groups whose lease ran out pending; returns those leases."""
    expired = [self._leases[i] for i in self.ids(LEASED) if self._leases[i].deadline_s <= now_s]
    for lease in expired:
      self.counters['lease_expiries'] += 1
      self._lease_failed(lease.group_id, self._records[lease.group_id], retry=True)
    return expired

  def drop(self, group_id: int, outcome: Outcome, reason: str) -> int:
    """Ends a whole group, whatever its status; returns the trajectories that ended by it."""
    self._forget(group_id)
    if group_id in self.ready:
      self.ready.remove(group_id)
    self.dropped_groups[reason] += 1
    return self.ledger.finish_group(group_id, outcome)

  def cancel(self, group_ids: Sequence[int]) -> int:
    """Ends groups as cancelled; returns the trajectories that ended by it."""
    return sum(self.drop(i, Outcome.CANCELLED, 'cancelled') for i in group_ids)

  def drop_stale(self, version: int) -> int:
    """Drops ready groups that are too old for `version`; returns how many groups."""
    stale = [i for i in self.ready if self._records[i].last_version < version]
    for group_id in stale:
      self.drop(group_id, Outcome.DROPPED_STALE, 'stale')
    return len(stale)

  def choose(self, rule: AdmissionRule, version: int) -> list[int] | None:
    """The ready groups that `rule` takes for the batch of `version`, or None while it waits."""
    last_versions = self.last_versions()
    ready = [i for i in self.ready if last_versions[i] >= version]
    return rule.choose(ready, last_versions, version=version)

  def look_at(self, group_ids: Sequence[int]) -> list[Group]:
    """Ready groups, which stay where they are."""
    return [self._groups[i] for i in group_ids]

  def take(self, group_ids: Sequence[int]) -> list[Group]:
    """Hands ready groups to the learner."""
    self.ready = [i for i in self.ready if i not in group_ids]
    for group_id in group_ids:
      self._records[group_id].status = TAKEN
    return self.look_at(group_ids)

  def end_taken(self, groups: Sequence[Group], outcome: Outcome) -> None:
    """Ends groups that were taken; FleetError, and no change, where one was not.

    Groups of another role than the first end alone; what is left of a lease ends with the group that it was for.
    """
    ids = [group.group_id for group in groups if not group.role]
    given = [group.group_id for group in groups]
    wrong = [i for i in given if i not in self._records or self._records[i].status != TAKEN]
    if wrong or len(set(ids)) < len(ids):
      raise FleetError(
        f'Groups {wrong or ids} are not with the learner; they cannot end as {outcome}.'
      )
    for trajectory in (t for group in groups if group.role for t in group.trajectories):
      self.ledger.finish(trajectory.group_id, trajectory.sample_index, outcome)
    for group_id in ids:
      self._forget(group_id)
      if self._greedy and outcome == Outcome.TRAINED:
        self.ledger.finish(group_id, self._group_size, Outcome.BASELINE)
      self.ledger.finish_group(group_id, outcome)
    if self._history is not None and outcome == Outcome.TRAINED:
      self._history.keep([group for group in groups if not group.role])

  def check(self) -> None:
    """Raises FleetError where the ledger does not close or knows other groups than the table."""
    self.ledger.check()
    if tuple(sorted(self._records)) != self.ledger.open_groups():
      raise FleetError(
        f'Groups {sorted(self._records)} and ledger {self.ledger.open_groups()} disagree: a bug.'
      )

  def metrics(self) -> dict[str, float]:
    """Figures of this moment and counts since the start, in trajectories where no other unit is named."""
    figures = {f'fleet/{name}': float(n) for name, n in self.ledger.counts().items()}
    for status in (PENDING, LEASED, READY):
      figures[f'fleet/groups_{status}'] = float(len(self.ids(status)))
    for reason in DROP_REASONS:
      figures[f'fleet/groups_dropped_{reason}'] = float(self.dropped_groups[reason])
    for name in ('duplicates', 'stale_leases', 'lease_expiries', 'failed_leases'):
      figures[f'fleet/{name}'] = float(self.counters[name])
    return figures

  def state(self) -> dict[str, Any]:
    """JSON value: ledger, counters, and the prompt of every unfinished group."""
    return {
      'ledger': self.ledger.state(),
      'prompts': {
        str(i): prompt_to_json(record.prompt) for i, record in sorted(self._records.items())
      },
      'counters': dict(self.counters),
      'dropped_groups': dict(self.dropped_groups),
      'history': None if self._history is None else self._history.state(),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes over `state()`: every unfinished group is pending. CheckpointError where it is malformed."""
    ledger = Ledger()
    ledger.restore(state['ledger'])
    records = {
      int(i): _Record(prompt=prompt_from_json(prompt)) for i, prompt in state['prompts'].items()
    }
    if tuple(sorted(records)) != ledger.open_groups():
      raise CheckpointError(
        f'Ledger {ledger.open_groups()} and prompts {sorted(records)} disagree. Use an older one.'
      )
    if self._history is not None and state.get('history') is not None:
      self._history.restore(state['history'])
    self.ledger, self._records, self.ready = ledger, records, []
    self._leases, self._groups = {}, {}
    self.counters = collections.Counter(state['counters'])
    self.dropped_groups = collections.Counter(state['dropped_groups'])

  def _fenced(self, lease: Lease) -> _Record:
    newest = self._leases.get(lease.group_id)
    if newest is None or newest.token != lease.token or lease.group_id in self._groups:
      self.counters['stale_leases'] += 1
      raise StaleLeaseError(
        f'The lease of group {lease.group_id} (attempt {lease.attempt}, worker {lease.worker_id}) is over: it expired '
        'and was given away, was given back, or is of another run. Drop the work and lease again.'
      )
    return self._records[lease.group_id]

  def _forget(self, group_id: int) -> None:
    del self._records[group_id]
    self._leases.pop(group_id, None)
    self._groups.pop(group_id, None)

  def _lease_failed(self, group_id: int, record: _Record, *, retry: bool) -> None:
    record.failures += 1
    record.status = PENDING
    if not retry or record.failures >= self._max_attempts:
      self.drop(group_id, Outcome.DROPPED_FAILED, 'worker_failed')
