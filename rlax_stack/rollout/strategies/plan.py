"""The words between a strategy and its driver: what a group is to draw, what is asked of the engine, and two Protocols.

Invariant: the requests of a plan depend on its task and on the samples it was given, never on the order in which those
came; so a group that is done again gives the same samples.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rlax_stack.data.prompt_history import HistorySettings
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.trajectory import Span, assemble
from rlax_stack.types import Branch, FinishReason, Past, Prompt, SamplingParams, Trajectory

Generate = Callable[[Sequence[GenerationRequest]], Sequence[FinishedSample]]


class TextTokenizer(Protocol):
  """What strategies need of models/tokenizer.py."""

  def encode(self, text: str) -> np.ndarray:
    """Tokens of a text, int32 [T]."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Text of tokens."""
    ...


class Limits(NamedTuple):
  """What a strategy may ask for, in tokens; `max_tokens` is the most that one sample may have."""

  prefix: int  # after the prompt, in the prompt_tokens of a request
  request: int  # sampled by one request
  context: int  # after the prompt, seen at once
  span: int  # after the prompt in a trajectory, with what it repeats
  top_log_probs: int = 0  # likeliest tokens per position
  history: HistorySettings | None = None  # what of the prompt's earlier visits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """One group to draw.

  samplings: of samples 0, 1, ...; those from `group_size` on are compared with and not trained on. version: of the
  weights that the group may start with. past: of the prompt, where the strategy's limits ask for history.
  """

  group_id: int
  prompt: Prompt
  prompt_tokens: np.ndarray  # int32 [P]
  samplings: tuple[SamplingParams, ...]
  group_size: int
  version: int
  tokenizer: TextTokenizer
  past: Past = Past()

  @property
  def extras(self) -> range:
    """Indices of the samples that are not trained on."""
    return range(self.group_size, len(self.samplings))

  def request(
    self,
    index: int,
    *,
    after: np.ndarray | None = None,
    used: int = 0,
    stage: int = 0,
    most: int | None = None,
    top_log_probs: int = 0,
    attention_distance: int = 0,
  ) -> GenerationRequest:
    """A request for (a part of) sample `index`.

    Args:
      index: of the sample.
      after: int32 tokens between the prompt and what is to be sampled.
      used: tokens of the sample's max_tokens and min_tokens that are there already.
      stage: each stage of a sample has randomness of its own; 0 for the first.
      most: tokens to sample at most, where that is less than what is left.
      top_log_probs: likeliest tokens per position.
      attention_distance: above 0 the sample comes with the attention that its tokens get from those so much later.
    """
    sampling = self.samplings[index]
    left = sampling.max_tokens - used
    left = left if most is None else min(left, most)
    sampling = dataclasses.replace(
      sampling,
      max_tokens=left,
      min_tokens=min(max(sampling.min_tokens - used, 0), left),
      top_log_probs=top_log_probs,
    )
    tokens = self.prompt_tokens if after is None else np.concatenate([self.prompt_tokens, after])
    return GenerationRequest(
      group_id=self.group_id,
      sample_index=index + stage * len(self.samplings),
      prompt_tokens=tokens.astype(np.int32),
      sampling=sampling,
      attention_distance=attention_distance,
    )

  def trajectory(
    self, index: int, spans: Sequence[Span], reason: FinishReason, branch: Branch | None = None
  ) -> Trajectory:
    """The trajectory of sample `index`, not scored yet."""
    return assemble(
      self.prompt_tokens,
      spans,
      group_id=self.group_id,
      sample_index=index,
      prompt_id=self.prompt.prompt_id,
      finish_reason=reason,
      branch=branch,
    )


class Plan(Protocol):
  """The drawing of one group."""

  def start(self) -> list[GenerationRequest]:
    """The first requests, those of samples that are not trained on in front."""
    ...

  def take(self, sample: FinishedSample) -> tuple[list[GenerationRequest], list[Trajectory]]:
    """What follows from a sample that ended: further requests, and trajectories that are complete."""
    ...


class Strategy(Protocol):
  """What config.rollout.strategy names."""

  @property
  def for_evaluation(self) -> 'Strategy':
    """How held-out samples are drawn under it."""
    ...

  def limits(self, max_tokens: int) -> Limits:
    """What its plans may ask for where a sample has at most `max_tokens`."""
    ...

  def problems(self, group_size: int) -> Iterator[str]:
    """Why groups of this size cannot be drawn so."""
    ...

  def plan(self, task: Task) -> Plan:
    """The plan of one group. Every sample index of the task becomes one trajectory."""
    ...


def carry_out(plans: Iterable[Plan], generate: Generate) -> list[Trajectory]:
  """Drives plans to their end, stage by stage; the trajectories in order of group and sample."""
  by_group: dict[int, Plan] = {}
  requests: list[GenerationRequest] = []
  for plan in plans:
    started = plan.start()
    by_group[started[0].group_id] = plan
    requests += started
  done: list[Trajectory] = []
  while requests:
    samples, requests = generate(requests), []
    for sample in samples:
      further, complete = by_group[sample.request.group_id].take(sample)
      requests += further
      done += complete
  return sorted(done, key=lambda trajectory: (trajectory.group_id, trajectory.sample_index))
