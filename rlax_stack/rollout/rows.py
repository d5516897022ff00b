"""A sample on the host, waiting or running: its tokens so far, where its KV comes from, and when its text ends it.

A row's KV is that of its prefix (the prompt and the first `recomputed` sampled tokens, prefilled) and of the tokens
after it (`fed` of them so far). A row that lost its KV is fed its own tokens again by the same program that sampled
them, so it goes on to the same bits; under other weights the tokens join the prefix instead.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlax_stack.rollout.prefix_table import Piece
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest, PartialSample
from rlax_stack.types import FinishReason


class Sampled(NamedTuple):
  """One value per token; the last four only where the engine gives them."""

  tokens: np.ndarray  # int32 [T]
  log_probs_t: np.ndarray  # float32 [T]
  raw_log_probs_t: np.ndarray  # float32 [T]
  version_t: np.ndarray  # int32 [T]
  top_ids_t: np.ndarray | None = None  # int32 [T, K]
  top_log_probs_t: np.ndarray | None = None  # float32 [T, K]
  kept_ids_t: np.ndarray | None = None  # int32 [T, kept_tokens]
  experts_before_t: np.ndarray | None = None  # int16 [T, L, k], of the token before each

  def part(self, which: slice) -> 'Sampled':
    """Some of the tokens."""
    values: list[Any] = [None if x is None else x[which] for x in self]
    return Sampled._make(values)


def nothing() -> Sampled:
  """No token yet."""
  ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
  return Sampled(ints, floats, floats, ints)


@dataclasses.dataclass(eq=False)
class Row:
  """One sample; a row with a `piece` has a slot, one that is `started` decodes."""

  request: GenerationRequest
  order: int  # of arrival
  parts: list[Sampled] = dataclasses.field(default_factory=list)
  recomputed: int = 0  # sampled tokens in its prefix
  kv_version: int = -1  # weights that made its KV, -1 where several did
  fed: int = 0  # tokens after the prefix that the device has
  piece: Piece | None = None
  started: bool = False
  prompt_experts: np.ndarray | None = None  # int16 [P, L, k]
  wish: int = 4  # proposed tokens that it wants checked at once
  rest: int = 0  # chunks since it wanted any

  @property
  def length(self) -> int:
    """Tokens sampled."""
    return sum(len(part.tokens) for part in self.parts)

  @property
  def sampled(self) -> Sampled:
    """All tokens so far."""
    if not self.parts:
      return nothing()
    if len(self.parts) > 1:
      joined: list[Any] = [
        None if values[0] is None else np.concatenate(values)
        for values in zip(*self.parts, strict=True)
      ]
      self.parts = [Sampled._make(joined)]
    return self.parts[0]

  @property
  def prefix(self) -> np.ndarray:
    """Tokens whose KV is prefilled, int32."""
    prompt = np.asarray(self.request.prompt_tokens, np.int32)
    if not self.recomputed:
      return prompt
    return np.concatenate([prompt, self.sampled.tokens[: self.recomputed]])

  @property
  def left(self) -> int:
    """Tokens after the prefix at most."""
    return self.request.sampling.max_tokens - self.recomputed

  def forced(self, steps: int) -> np.ndarray:
    """Tokens among the next `steps` that are known already, int32."""
    start = self.recomputed + self.fed
    if start >= self.length:
      return np.zeros(0, np.int32)
    return self.sampled.tokens[start : start + steps]

  def set_back(self) -> None:
    """The row has lost its slot and its KV; its tokens stay."""
    self.fed, self.piece, self.started = 0, None, False

  def begin(self, version: int) -> None:
    """Fixes what its prefix is, for a start under these weights."""
    if self.kv_version != version:
      self.recomputed, self.kv_version = self.length, version

  def partial(self, seed: int) -> PartialSample:
    """What another scheduler needs to go on; `seed` is of requests without one."""
    request, sampled = self.request, self.sampled
    if request.sampling.seed is None:
      sampling = dataclasses.replace(request.sampling, seed=seed)
      request = dataclasses.replace(request, sampling=sampling)
    fields: dict[str, Any] = sampled._asdict()
    return PartialSample(
      request=request,
      recomputed=self.recomputed,
      kv_version=self.kv_version,
      prompt_experts=self.prompt_experts,
      **fields,
    )

  def finished(self, reason: FinishReason) -> FinishedSample:
    """The sample as it is."""
    sampled = self.sampled
    tops = self.request.sampling.top_log_probs
    fields: dict[str, Any] = sampled._asdict()
    for name in ('top_ids_t', 'top_log_probs_t'):
      fields[name] = fields[name][:, :tops] if tops and fields[name] is not None else None
    fields['experts_t'] = self._experts(fields.pop('experts_before_t'))
    return FinishedSample(request=self.request, finish_reason=reason, **fields)

  def _experts(self, before: np.ndarray | None) -> np.ndarray | None:
    """Experts of the tokens of prompt and sample, int16 [P + T, L, k]; -1 for the last, which nothing has followed."""
    prompt = self.prompt_experts
    if prompt is None or before is None:
      return None
    return np.concatenate([prompt[:-1], before, np.full_like(prompt[:1], -1)])

  def cut_at_stop_string(self, fresh: int, decode_text: Callable[[Sequence[int]], str]) -> bool:
    """Whether one of the last `fresh` tokens completed a stop string; drops the tokens after it."""
    sampling, sampled = self.request.sampling, self.sampled
    tokens = sampled.tokens

    def completed(count: int) -> bool:
      text = decode_text(tokens[:count].tolist())
      return any(stop in text for stop in sampling.stop_strings)

    first = max(len(tokens) - fresh + 1, sampling.min_tokens)
    if first > len(tokens) or not completed(len(tokens)):
      return False
    count = next(n for n in range(first, len(tokens) + 1) if completed(n))
    self.parts = [sampled.part(slice(count))]
    return True


def row_of(partial: PartialSample, order: int) -> Row:
  """The row that another scheduler gave away."""
  parts = [Sampled._make(getattr(partial, name) for name in Sampled._fields)]
  return Row(
    request=partial.request,
    order=order,
    parts=parts if len(partial.tokens) else [],
    recomputed=partial.recomputed,
    kv_version=partial.kv_version,
    prompt_experts=partial.prompt_experts,
  )
