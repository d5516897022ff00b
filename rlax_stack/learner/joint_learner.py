"""Several learners as one: each trains on the groups of the roles that its policy plays, all of them at every batch.

For a run of several policies. Not for how their groups are drawn. Invariant: all learners are at one version, so that
one number says which weights of every policy belong together.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlax_stack.errors import CheckpointError, DataError
from rlax_stack.learner.adapter_identity import check_identity
from rlax_stack.learner.learner import Learner
from rlax_stack.learner.state import LearnerState
from rlax_stack.learner.step_clock import StepMetrics
from rlax_stack.types import Group


class JointMetrics:
  """StepMetrics of every policy; those of the first have their bare names, the others' begin with `<policy>/train/`."""

  def __init__(self, steps: Mapping[str, StepMetrics], start_s: float):
    self._steps, self._start_s = dict(steps), start_s
    self._seconds: dict[str, float] | None = None

  def is_ready(self) -> bool:
    """Whether the devices are done with all steps."""
    return all(step.is_ready() for step in self._steps.values())

  def seconds(self) -> dict[str, float]:
    """Where the time of all steps together went, as StepMetrics says it; blocks until they are done."""
    if self._seconds is None:
      each = [step.seconds() for step in self._steps.values()]
      parts = {name: sum(s.get(name, 0.0) for s in each) for name in ('data', 'log_probs')}
      # The second is packed while the first computes: the rest is told from the whole.
      rest = time.monotonic() - self._start_s - sum(parts.values())
      self._seconds = parts | {'train': max(0.0, rest)}
    return dict(self._seconds)

  def result(self) -> dict[str, float]:
    """All metrics as Python floats; blocks until the steps are done."""
    self.seconds()
    return {
      name if not policy else f'{policy}/train/{name}': value
      for policy, step in self._steps.items()
      for name, value in step.result().items()
    }


class JointLearner:
  """What the loop needs of a Learner, over several.

  Args:
    learners: by policy, all of one version; '' is the first.
    roles: role to the policy that plays it; '' is the role that prompts are given to.
  """

  def __init__(self, learners: Mapping[str, Learner], roles: Mapping[str, str]):
    unknown = sorted({*roles.values(), ''} - learners.keys())
    if unknown:
      raise ValueError(f'no learner for the policies {unknown}, only for {sorted(learners)}.')
    self._learners, self._roles = dict(learners), dict(roles)
    self._first = self._learners['']

  @property
  def version(self) -> int:
    """Batches trained."""
    return self._first.version

  @property
  def state(self) -> dict[str, LearnerState]:
    """What a checkpoint stores, by policy. Its arrays are given up at the next `train`."""
    return {name: learner.state for name, learner in self._learners.items()}

  @property
  def host_state(self) -> dict[str, Any]:
    """That of the first learner; under 'policies' those of the others, with what their adapters belong to."""
    others = {
      name: {'objective': learner.host_state, 'adapter': learner.adapter_identity}
      for name, learner in self._learners.items()
      if name
    }
    return {**self._first.host_state, 'policies': others}

  @property
  def adapter_identity(self) -> dict[str, Any] | None:
    """Of the first learner's adapter; those of all are computed by it, once."""
    return {name: learner.adapter_identity for name, learner in self._learners.items()}['']

  def snapshot(self) -> dict[str, Any]:
    """Copies of what is to be published, by policy."""
    return {name: learner.snapshot() for name, learner in self._learners.items()}

  def abstract_state(self) -> dict[str, Any]:
    """Shapes, dtypes and shardings of `state`, for restoring into."""
    return {name: learner.abstract_state() for name, learner in self._learners.items()}

  def restore(
    self, state: Mapping[str, LearnerState], host_state: Mapping[str, Any] | None = None
  ) -> None:
    """Continues from `state` and `host_state`.

    Raises:
      CheckpointError: the policies are at different versions, or an adapter is of other weights.
    """
    saved = dict(host_state or {})
    others = saved.pop('policies', {})
    for name, learner in self._learners.items():
      mine = others.get(name, {}) if name else {'objective': saved}
      here = learner.adapter_identity if name else None
      if here is not None:
        check_identity(mine.get('adapter'), here, f'policy {name} of the checkpoint')
      learner.restore(state[name], mine.get('objective'))
    versions = {name: learner.version for name, learner in self._learners.items()}
    if len(set(versions.values())) > 1:
      raise CheckpointError(
        f'the checkpoint holds policies of different versions, {versions}. Use an older one.'
      )

  def take_critic(self, found: Any, source: str) -> None:
    """Starts the first learner from the critic of an earlier run; see `Learner.take_critic`."""
    self._first.take_critic(found, source)

  def train(self, groups: Sequence[Group]) -> JointMetrics:
    """Trains every policy on its part of one batch; see `Learner.train`.

    Args:
      groups: those of the first role, with the others that came of them.

    Raises:
      DataError: a policy without any group.
    """
    parts = {name: self._groups_of(name, groups) for name in self._learners}
    empty = sorted(name for name, part in parts.items() if not part)
    if empty:
      raise DataError(f'the batch has no group for the policies {empty}. Deliver all roles.')
    for learner in self._learners.values():
      learner.check_finite()  # all or none: versions stay together
    start_s = time.monotonic()
    steps = {name: self._learners[name].train(part) for name, part in parts.items()}
    return JointMetrics(steps, start_s)

  def prepare(self, groups: Sequence[Group]) -> bool:
    """`Learner.prepare` of every policy's part."""
    return all(
      [learner.prepare(self._groups_of(n, groups)) for n, learner in self._learners.items()]
    )

  def _groups_of(self, policy: str, groups: Sequence[Group]) -> list[Group]:
    return [g for visit in groups for g in visit.of_all_roles if self._roles[g.role] == policy]
