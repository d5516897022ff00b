"""Several schedulers as one: each has an engine and the weights of one policy; a request goes to the one it names.

For a worker that serves several policies, whose weights are published together. Invariant: the version here is the
lowest of theirs, so that what waits for a version finds every policy at it. Not thread-safe, as a scheduler is.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlax_stack.rollout.decode_batch import SchedulerStats
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler


class JointScheduler:
  """The part of a Scheduler that a worker uses, over several.

  Args:
    schedulers: by policy; '' is the first policy, from which all other work follows.
  """

  def __init__(self, schedulers: Mapping[str, Scheduler]):
    if '' not in schedulers:
      raise ValueError(f"a scheduler for policy '' is needed, got those of {sorted(schedulers)}.")
    self._schedulers = dict(schedulers)
    self._first = self._schedulers['']

  @property
  def version(self) -> int:
    """The lowest version in use."""
    return min(scheduler.version for scheduler in self._schedulers.values())

  @property
  def newest_version(self) -> int:
    """The lowest of the newest versions."""
    return min(scheduler.newest_version for scheduler in self._schedulers.values())

  @property
  def num_running(self) -> int:
    """Slots in use."""
    return sum(scheduler.num_running for scheduler in self._schedulers.values())

  @property
  def free_capacity(self) -> int:
    """Samples of the first policy to submit now."""
    return self._first.free_capacity

  @property
  def has_work(self) -> bool:
    """Whether step() has anything to do or to hand over."""
    return any(scheduler.has_work for scheduler in self._schedulers.values())

  @property
  def stats(self) -> SchedulerStats:
    """Sums over all of them; a copy."""
    names = [field.name for field in dataclasses.fields(SchedulerStats)]
    return SchedulerStats(
      **{n: sum(getattr(s.stats, n) for s in self._schedulers.values()) for n in names}
    )

  def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
    """The serving form of every policy's weights, by policy; from any thread."""
    return {name: each.prepare(params[name]) for name, each in self._schedulers.items()}

  def swap_prepared(self, fresh: Mapping[str, Any], version: int) -> None:
    """`Scheduler.swap_prepared` of each."""
    for name, scheduler in self._schedulers.items():
      scheduler.swap_prepared(fresh[name], version)

  def warm_up(self) -> None:
    """Compiles every program of every engine."""
    for scheduler in self._schedulers.values():
      scheduler.warm_up()

  def submit(self, request: GenerationRequest) -> None:
    """Queues a sample with the policy that it names; see `Scheduler.submit`."""
    self._schedulers[request.policy].submit(request)

  def step(self) -> list[FinishedSample]:
    """One step of each that has work, one after another; the samples that ended."""
    working = [scheduler for scheduler in self._schedulers.values() if scheduler.has_work]
    return [sample for scheduler in working for sample in scheduler.step()]

  def generate_all(self, requests: Sequence[GenerationRequest]) -> list[FinishedSample]:
    """Runs requests of one policy to the end; see `Scheduler.generate_all`."""
    policies = {request.policy for request in requests}
    if len(policies) > 1:
      raise ValueError(f'these requests are of several policies, {sorted(policies)}. Ask for each.')
    return self._schedulers[policies.pop()].generate_all(requests) if policies else []

  def cancel(self, group_id: int) -> list[FinishedSample]:
    """Ends a group's samples of all policies at once."""
    return [done for each in self._schedulers.values() for done in each.cancel(group_id)]
