"""From a finished sample to a trajectory: the prompt's tokens in front, per-token records where tokens were sampled."""

import numpy as np

from rlax_stack.rollout.requests import FinishedSample
from rlax_stack.types import Reward, Source, Trajectory


def make_trajectory(
  sample: FinishedSample, *, prompt_id: str, text: str, reward: Reward | None
) -> Trajectory:
  """A single-turn trajectory: every sampled token, stop token included, is trained on."""
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
  )
