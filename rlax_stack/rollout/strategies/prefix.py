"""Some samples of a group go on from the beginning of a given solution."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import numpy as np

from rlax_stack.errors import DataError
from rlax_stack.objectives.boxes import Range
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.plan import Limits, Plan, Task
from rlax_stack.rollout.trajectory import given_span, sampled_span
from rlax_stack.types import Source, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
  """Guided and unguided samples in one group: the first tokens of a solution are given and never trained on.

  The first round(guided * group_size) samples of a group are guided, the i-th of them by the fraction
  fractions[i mod K] of the solution's tokens. What is given counts towards max_tokens, and the verifier sees it as part
  of the answer. A prompt whose solution is empty is drawn unguided.
  All samples guided by one fraction: "Reuse your FLOPs", Setlur et al. (https://arxiv.org/abs/2601.18795). Beside
  unguided ones: POPE. Several fractions: the mixed starts of R3, "Training Large Language Models for Reasoning through
  Reverse Curriculum Reinforcement Learning", Xi et al. (https://arxiv.org/abs/2402.05808).

  Options:
    guided: share of the group's samples that are guided.
    fractions: of the solution, in tokens; one for each guided sample in turn.
    decay_versions: the fractions shrink to 0 in a line over so many versions of the weights; 0 keeps them.
    field: of the prompt's metadata that holds the solution; '' takes its answer.
  """

  guided: Annotated[float, Range(0.0, 1.0)] = 0.5
  fractions: tuple[float, ...] = (0.5,)
  decay_versions: Annotated[int, Range(0)] = 0
  field: str = 'solution'

  @property
  def for_evaluation(self) -> Independent:
    """Held-out samples are not guided."""
    return Independent()

  def limits(self, max_tokens: int) -> Limits:
    """At least one token is sampled after the prefix."""
    return Limits(prefix=max_tokens - 1, request=max_tokens, context=max_tokens, span=max_tokens)

  def problems(self, group_size: int) -> Iterator[str]:
    """Fractions that are none."""
    del group_size
    if not self.fractions or not all(0 < fraction <= 1 for fraction in self.fractions):
      yield f'fractions must be above 0 and at most 1, one or more, got {self.fractions}.'

  def plan(self, task: Task) -> Plan:
    """The plan of one group; DataError where its prompt has no such field."""
    return _PrefixPlan(self, task)


class _PrefixPlan:
  """See Prefix."""

  def __init__(self, strategy: Prefix, task: Task):
    self._task = task
    solution = _solution(strategy, task)
    tokens = (
      np.asarray(task.tokenizer.encode(solution), np.int32) if solution else np.zeros(0, np.int32)
    )
    decay = strategy.decay_versions
    scale = max(0.0, 1 - task.version / decay) if decay else 1.0
    self._given: dict[int, np.ndarray] = {}
    for index in range(round(strategy.guided * task.group_size)):
      fraction = scale * strategy.fractions[index % len(strategy.fractions)]
      count = min(round(fraction * len(tokens)), task.samplings[index].max_tokens - 1)
      if count:
        self._given[index] = tokens[:count]

  def start(self) -> list[GenerationRequest]:
    """One request a sample, after what it is given."""
    return [self._request(i) for i in (*self._task.extras, *range(self._task.group_size))]

  def take(self, sample: FinishedSample) -> tuple[list[GenerationRequest], list[Trajectory]]:
    """Its trajectory, with what it was given as GUIDE."""
    index = sample.request.sample_index
    spans = [sampled_span(sample)]
    if index in self._given:
      spans.insert(0, given_span(self._given[index], source=Source.GUIDE))
    return [], [self._task.trajectory(index, spans, sample.finish_reason)]

  def _request(self, index: int) -> GenerationRequest:
    given = self._given.get(index)
    if given is None:
      return self._task.request(index)
    return self._task.request(index, after=given, used=len(given))


def _solution(strategy: Prefix, task: Task) -> str:
  prompt, field = task.prompt, strategy.field
  if not field:
    return prompt.answer
  if not isinstance(prompt.metadata.get(field), str):
    raise DataError(
      f'prompt {prompt.prompt_id} has no text {field!r} in its metadata, only {sorted(prompt.metadata)}. '
      "Name one that holds the solution with prefix(field=...), or field='' for the answer."
    )
  return prompt.metadata[field]
