"""From a finished sample to a trajectory: the prompt's tokens in front, per-token records where tokens were sampled."""

import bisect
from collections.abc import Callable, Sequence

import numpy as np

from rlax_stack.rollout.requests import FinishedSample
from rlax_stack.types import Reward, Source, Trajectory


def make_trajectory(
  sample: FinishedSample,
  *,
  prompt_id: str,
  text: str,
  reward: Reward | None,
  step_ends: Sequence[int] = (),
) -> Trajectory:
  """A single-turn trajectory: every sampled token, stop token included, is trained on.

  `step_ends` counts sampled tokens, as the function of that name does.
  """
  prompt = np.asarray(sample.request.prompt_tokens, np.int32)
  sampled = np.arange(len(prompt) + len(sample.tokens)) >= len(prompt)

  def after_prompt(values: np.ndarray, fill: float, dtype: type) -> np.ndarray:
    return np.concatenate([np.full(len(prompt), fill, dtype), values.astype(dtype)])

  return Trajectory(
    group_id=sample.request.group_id,
    sample_index=sample.request.sample_index,
    prompt_id=prompt_id,
    tokens=np.concatenate([prompt, sample.tokens]).astype(np.int32),
    source_t=np.where(sampled, Source.POLICY, Source.PROMPT).astype(np.int8),
    mask_t=sampled,
    behaviour_log_probs_t=after_prompt(sample.log_probs_t, 0.0, np.float32),
    raw_log_probs_t=after_prompt(sample.raw_log_probs_t, 0.0, np.float32),
    version_t=after_prompt(sample.version_t, -1, np.int32),
    finish_reason=sample.finish_reason,
    text=text,
    reward=reward,
    step_ends=tuple(len(prompt) + end for end in step_ends),
  )


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
