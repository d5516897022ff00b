"""Some samples of a group go on from the beginning of what an earlier policy sampled for the prompt."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from rlax_stack.data.prompt_history import HistorySettings
from rlax_stack.objectives.boxes import Range
from rlax_stack.rng import numpy_rng
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.plan import Limits, Plan, Task
from rlax_stack.rollout.trajectory import Span, sampled_span
from rlax_stack.types import PastSample, Source, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
  """A sample begins with a prefix of one from the prompt's last visit, and the current policy goes on.

  The first round(replayed * group_size) samples of a group take over the first tokens of past samples, in turn; the
  i-th takes fractions[i mod K] of one, its last token never. These are GUIDE and keep the log-probs and versions they
  were sampled with. With `trains='all'` they are trained on, each token's ratio against the policy that drew it:
  "SOUP", Yang et al. (https://arxiv.org/abs/2601.21476). With 'own' only what the current policy adds is:
  the prefixes from earlier training of "Reuse your FLOPs", Setlur et al. (https://arxiv.org/abs/2601.18795). At a
  prompt's first visit
  every sample is drawn from the prompt. Staleness is that of what was sampled now.

  Options:
    replayed: share of the group's samples that begin so.
    fractions: of a past sample, in tokens; one for each such sample in turn.
    trains: 'all' the taken tokens too, 'own' not these.
    choose: which samples of a visit are held: 'any', or the 'best', those of the highest reward.
    held: samples of a visit that are held.
  """

  replayed: Annotated[float, Range(0.0, 1.0)] = 0.5
  fractions: tuple[float, ...] = (0.25, 0.5, 0.75)
  trains: Literal['all', 'own'] = 'all'
  choose: Literal['any', 'best'] = 'any'
  held: Annotated[int, Range(1)] = 1

  @property
  def for_evaluation(self) -> Independent:
    """Held-out samples are drawn from the prompt."""
    return Independent()

  @property
  def trains_on_the_past(self) -> bool:
    """Whether tokens of older policies are trained on."""
    return self.trains == 'all'

  def limits(self, max_tokens: int) -> Limits:
    """At least one token is sampled after the prefix."""
    return Limits(
      prefix=max_tokens - 1,
      request=max_tokens,
      context=max_tokens,
      span=max_tokens,
      history=HistorySettings(samples=self.held, best=self.choose == 'best'),
    )

  def problems(self, group_size: int) -> Iterator[str]:
    """Fractions that are none, and a share that takes no sample."""
    if not self.fractions or not all(0 < fraction <= 1 for fraction in self.fractions):
      yield f'fractions must be above 0 and at most 1, one or more, got {self.fractions}.'
    if not round(self.replayed * group_size):
      yield (
        f'replayed={self.replayed:g} of config.rollout.group_size={group_size} samples is none. Raise one of them, or '
        "set the strategy to 'independent'."
      )

  def plan(self, task: Task) -> Plan:
    """The plan of one group."""
    return _ReplayPlan(self, task)


class _ReplayPlan:
  """See Replay."""

  def __init__(self, strategy: Replay, task: Task):
    self._task = task
    self._taken: dict[int, Span] = {}
    past = task.past.samples
    if not past:
      return
    seed = task.samplings[0].seed or 0
    first = int(numpy_rng(seed, 'replay', task.group_id).integers(len(past)))
    for index in range(round(strategy.replayed * task.group_size)):
      sample = past[(first + index) % len(past)]
      fraction = strategy.fractions[index % len(strategy.fractions)]
      limit = min(len(sample.tokens), task.samplings[index].max_tokens) - 1
      count = min(round(fraction * len(sample.tokens)), limit)
      if count > 0:
        self._taken[index] = _span(sample).first(count, trained=strategy.trains_on_the_past)

  def start(self) -> list[GenerationRequest]:
    """One request a sample, after what it takes over."""
    return [self._request(i) for i in (*self._task.extras, *range(self._task.group_size))]

  def take(self, sample: FinishedSample) -> tuple[list[GenerationRequest], list[Trajectory]]:
    """Its trajectory, with what it took over as GUIDE."""
    index = sample.request.sample_index
    spans = [sampled_span(sample)]
    if index in self._taken:
      spans.insert(0, self._taken[index])
    return [], [self._task.trajectory(index, spans, sample.finish_reason)]

  def _request(self, index: int) -> GenerationRequest:
    taken = self._taken.get(index)
    if taken is None:
      return self._task.request(index)
    return self._task.request(index, after=taken.tokens, used=len(taken.tokens))


def _span(sample: PastSample) -> Span:
  return Span(
    sample.tokens,
    sample.behaviour_log_probs_t,
    sample.raw_log_probs_t,
    sample.version_t,
    Source.GUIDE,
    False,
    False,
    sample.kept_ids_t,
  )
