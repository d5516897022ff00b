"""Thinking in chunks: at the end of each the context is set back to the prompt and a short carry-over."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import numpy as np

from rlax_stack.objectives.boxes import Range
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.strategies.plan import Limits, Plan, Task
from rlax_stack.rollout.trajectory import Span, given_span, sampled_span
from rlax_stack.types import FinishReason, Source, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delethink:
  """Markovian thinking: the context after the prompt never exceeds `chunk` tokens, however long the sample.

  The first chunk samples up to C tokens. Where it did not stop, the next context is the prompt and the last m tokens
  sampled so far, and up to C − m more are sampled, until a stop or max_tokens in all. A sample stays one trajectory of
  the group, with one reward and one advantage for all its chunks; the tokens carried over are GUIDE there and not
  trained on a second time. The learner packs every chunk as a child of the prompt, so a token is trained in the context
  it was sampled in. Held-out samples are drawn in chunks too.
  See "The Markovian Thinker", Aghajohari et al. (https://arxiv.org/abs/2510.06557).

  Options:
    chunk: C, tokens after the prompt in one context.
    carry: m, tokens carried over, fewer than C.
  """

  chunk: Annotated[int, Range(1)] = 128
  carry: Annotated[int, Range(0)] = 64

  @property
  def for_evaluation(self) -> 'Delethink':
    """The same."""
    return self

  def limits(self, max_tokens: int) -> Limits:
    """A request has one chunk; a trajectory repeats the carry-over at every further one."""
    chunk = min(self.chunk, max_tokens)
    further = -(-(max_tokens - chunk) // (self.chunk - self.carry))
    return Limits(
      prefix=self.carry if further else 0,
      request=chunk,
      context=chunk,
      span=max_tokens + further * self.carry,
    )

  def problems(self, group_size: int) -> Iterator[str]:
    """A carry-over that leaves no room."""
    del group_size
    if self.carry >= self.chunk:
      yield f'carry={self.carry} leaves nothing to sample in a chunk of {self.chunk}. Lower it.'

  def plan(self, task: Task) -> Plan:
    """The plan of one group."""
    return _DelethinkPlan(self, task)


class _DelethinkPlan:
  """See Delethink."""

  def __init__(self, strategy: Delethink, task: Task):
    self._strategy, self._task = strategy, task
    self._spans: dict[int, list[Span]] = {index: [] for index in range(len(task.samplings))}
    self._stages = dict.fromkeys(self._spans, 0)

  def start(self) -> list[GenerationRequest]:
    """The first chunk of every sample."""
    order = (*self._task.extras, *range(self._task.group_size))
    return [self._task.request(index, most=self._strategy.chunk) for index in order]

  def take(self, sample: FinishedSample) -> tuple[list[GenerationRequest], list[Trajectory]]:
    """The next chunk, or the trajectory."""
    task, carry = self._task, self._strategy.carry
    index = sample.request.sample_index % len(task.samplings)
    spans = self._spans[index]
    # Without a carry-over the chunk itself begins the context.
    spans.append(sampled_span(sample, new_context=bool(spans) and not carry))
    thought = np.concatenate([span.tokens for span in spans if span.source == Source.POLICY])
    done = len(thought) >= task.samplings[index].max_tokens
    if sample.finish_reason != FinishReason.LENGTH or done:
      return [], [task.trajectory(index, spans, sample.finish_reason)]
    kept = thought[len(thought) - carry :]
    if carry:
      spans.append(given_span(kept, source=Source.GUIDE, new_context=True))
    self._stages[index] += 1
    request = task.request(
      index,
      after=kept,
      used=len(thought),
      stage=self._stages[index],
      most=self._strategy.chunk - carry,
    )
    return [request], []
