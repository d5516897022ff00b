"""From samples to trajectories: spans of tokens after the prompt, each with who wrote it and whether it is trained on.

Not for what is drawn (strategies/) or how it is scored. Invariant: a trajectory's text is that of its tokens after the
prompt, what a new context repeats left out.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlax_stack.rollout.requests import FinishedSample
from rlax_stack.types import Branch, FinishReason, Reward, Source, Trajectory


class Span(NamedTuple):
  """Neighbouring tokens of one writer; arrays [T]."""

  tokens: np.ndarray  # int32
  log_probs_t: np.ndarray  # float32
  raw_log_probs_t: np.ndarray  # float32
  version_t: np.ndarray  # int32
  source: Source
  trained: bool
  new_context: bool = False  # whether the context is set back to the prompt before it
  kept_ids_t: np.ndarray | None = None  # int32 [T, K]
  experts_t: np.ndarray | None = None  # int16 [C + T, L, k], those of its context before it too

  def first(self, count: int, *, trained: bool) -> 'Span':
    """Its first `count` tokens."""
    parts = dict(zip(self._fields[:4], (x[:count] for x in self[:4]), strict=True))
    kept = None if self.kept_ids_t is None else self.kept_ids_t[:count]
    experts = self.experts_t
    if experts is not None:
      experts = experts[: len(experts) - len(self.tokens) + count]
    return self._replace(**parts, kept_ids_t=kept, experts_t=experts, trained=trained)


def sampled_span(
  sample: FinishedSample, *, trained: bool = True, new_context: bool = False
) -> Span:
  """What was sampled, the stop token included."""
  return Span(
    sample.tokens,
    sample.log_probs_t,
    sample.raw_log_probs_t,
    sample.version_t,
    Source.POLICY,
    trained,
    new_context,
    sample.kept_ids_t,
    sample.experts_t,
  )


def given_span(tokens: np.ndarray, *, source: Source, new_context: bool = False) -> Span:
  """Tokens that were not sampled here: nothing is known of them and nothing is trained."""
  tokens = np.asarray(tokens, np.int32)
  zeros, none = np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
  return Span(tokens, zeros, zeros, none, source, False, new_context)


def assemble(
  prompt_tokens: np.ndarray,
  spans: Sequence[Span],
  *,
  group_id: int,
  sample_index: int,
  prompt_id: str,
  finish_reason: FinishReason,
  branch: Branch | None = None,
) -> Trajectory:
  """The trajectory of a prompt and the spans after it, in order, without text and reward.

  Tokens whose kept set had no room are not trained on: the probability they were drawn with is not known.
  """
  whole = [given_span(prompt_tokens, source=Source.PROMPT), *spans]
  starts = np.cumsum([0, *(len(span.tokens) for span in whole)]).tolist()

  def joined(index: int, dtype: type) -> np.ndarray:
    return np.concatenate([span[index] for span in whole]).astype(dtype)

  def repeated(values: Sequence[int], dtype: type) -> np.ndarray:
    return np.repeat(np.array(values, dtype), [len(span.tokens) for span in whole])

  made = Trajectory(
    group_id=group_id,
    sample_index=sample_index,
    prompt_id=prompt_id,
    tokens=joined(0, np.int32),
    source_t=repeated([span.source for span in whole], np.int8),
    mask_t=repeated([span.trained for span in whole], bool),
    behaviour_log_probs_t=joined(1, np.float32),
    raw_log_probs_t=joined(2, np.float32),
    version_t=joined(3, np.int32),
    finish_reason=finish_reason,
    context_starts=tuple(
      start for start, span in zip(starts, whole, strict=False) if span.new_context
    ),
    branch=branch,
    kept_ids_t=_joined_kept(whole),
    experts_t=_joined_experts(whole, starts),
  )
  return dataclasses.replace(made, mask_t=made.mask_t & ~made.kept_overflow_t)


def _joined_kept(spans: Sequence[Span]) -> np.ndarray | None:
  """The kept sets of spans, int32 [T, K]; all -1 where a span has none, None where all have none."""
  width = max((s.kept_ids_t.shape[1] for s in spans if s.kept_ids_t is not None), default=0)
  if not width:
    return None
  joined = np.full((sum(len(span.tokens) for span in spans), width), -1, np.int32)
  start = 0
  for span in spans:
    end = start + len(span.tokens)
    if span.kept_ids_t is not None:
      joined[start:end, : span.kept_ids_t.shape[1]] = span.kept_ids_t
    start = end
  return joined


def _joined_experts(spans: Sequence[Span], starts: Sequence[int]) -> np.ndarray | None:
  """Experts of the tokens of spans, int16 [T, L, k], as they were first recorded; -1 where none were.

  Args:
    spans: of a trajectory, its prompt first.
    starts: of each of them, and the end.
  """
  recorded = [span.experts_t for span in spans if span.experts_t is not None]
  if not recorded:
    return None
  joined = np.full((starts[-1], *recorded[0].shape[1:]), -1, np.int16)
  prompt, context = np.arange(starts[1]), starts[1]
  for span, start, end in zip(spans, starts, starts[1:], strict=False):
    if span.new_context:
      context = start
    if span.experts_t is None:
      continue
    places = np.concatenate([prompt, np.arange(context, end)])
    fresh = joined[places, 0, 0] < 0
    joined[places[fresh]] = span.experts_t[fresh]
  return joined


def make_trajectory(
  sample: FinishedSample, *, prompt_id: str, text: str = '', reward: Reward | None = None
) -> Trajectory:
  """A single-turn trajectory: every sampled token, stop token included, is trained on."""
  made = assemble(
    np.asarray(sample.request.prompt_tokens, np.int32),
    [sampled_span(sample)],
    group_id=sample.request.group_id,
    sample_index=sample.request.sample_index,
    prompt_id=prompt_id,
    finish_reason=sample.finish_reason,
  )
  return dataclasses.replace(made, text=text, reward=reward)


def text_places(trajectory: Trajectory) -> np.ndarray:
  """Indices of the tokens that make its text, int [K]: those after the prompt, save what a new context repeats."""
  source = np.asarray(trajectory.source_t)
  first = trajectory.context_starts[0] if trajectory.context_starts else len(source)
  again = (source == Source.GUIDE) & (np.arange(len(source)) >= first)
  return np.flatnonzero((source != Source.PROMPT) & ~again)


def scored(
  trajectory: Trajectory, text: str, reward: Reward, decode: Callable[[Sequence[int]], str]
) -> Trajectory:
  """With its text and reward, and the ends of the reward's steps in tokens."""
  places = text_places(trajectory)
  counts = step_ends(trajectory.tokens[places], reward.step_ends, decode)
  after = np.append(places[:1], places + 1)  # where a step of so many tokens ends
  ends = tuple(int(after[count]) for count in counts) if len(places) else ()
  return dataclasses.replace(trajectory, text=text, reward=reward, step_ends=ends)


def step_ends(
  tokens: np.ndarray, ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
  """How many of the sampled tokens reach up to each step's end.

  Args:
    tokens: int32 [T], sampled.
    ends: in characters of the text of all of them.
    decode: tokens -> text.
  """
  counts = range(len(tokens) + 1)

  def characters(count: int) -> int:
    return len(decode(tokens[:count].tolist()))

  return tuple(min(bisect.bisect_left(counts, end, key=characters), len(tokens)) for end in ends)
