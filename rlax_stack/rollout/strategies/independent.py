"""Every sample is drawn from the prompt on, by itself."""

import dataclasses
from collections.abc import Iterator

from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.strategies.plan import Limits, Plan, Task
from rlax_stack.rollout.trajectory import make_trajectory
from rlax_stack.types import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Independent:
  """Samples that know nothing of each other: the groups of GRPO.

  See "DeepSeekMath", Shao et al. (https://arxiv.org/abs/2402.03300).
  """

  @property
  def for_evaluation(self) -> 'Independent':
    """The same."""
    return self

  def limits(self, max_tokens: int) -> Limits:
    """A sample is one request."""
    return Limits(prefix=0, request=max_tokens, context=max_tokens, span=max_tokens)

  def problems(self, group_size: int) -> Iterator[str]:
    """None."""
    del group_size
    yield from ()

  def plan(self, task: Task) -> Plan:
    """One request a sample."""
    return _IndependentPlan(task)


class _IndependentPlan:
  """See Independent."""

  def __init__(self, task: Task):
    self._task = task

  def start(self) -> list[GenerationRequest]:
    """All requests."""
    return [self._task.request(i) for i in (*self._task.extras, *range(self._task.group_size))]

  def take(self, sample: FinishedSample) -> tuple[list[GenerationRequest], list[Trajectory]]:
    """Its trajectory."""
    return [], [make_trajectory(sample, prompt_id=self._task.prompt.prompt_id)]
