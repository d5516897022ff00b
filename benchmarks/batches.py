"""Batches of random tokens for the benchmarks of the learner."""

from typing import NamedTuple

import numpy as np

from rlax_stack.models.config import ModelConfig
from rlax_stack.types import FinishReason, Group, Prompt, Trajectory


class Workload(NamedTuple):
  """A batch: groups of group_size samples, in tokens."""

  groups: int
  group_size: int
  prompt_tokens: int
  sampled_tokens: int


def make_groups(config: ModelConfig, work: Workload) -> list[Group]:
  """Groups of random tokens, every sampled one trained on."""
  rng = np.random.default_rng(0)
  groups = []
  length = work.prompt_tokens + work.sampled_tokens
  sampled = np.arange(length) >= work.prompt_tokens
  for group_id in range(work.groups):
    prompt = rng.integers(0, config.vocab_size, work.prompt_tokens).astype(np.int32)
    trajectories = tuple(
      Trajectory(
        group_id=group_id,
        sample_index=i,
        prompt_id=str(group_id),
        tokens=np.concatenate(
          [prompt, rng.integers(0, config.vocab_size, work.sampled_tokens).astype(np.int32)]
        ),
        source_t=sampled.astype(np.int8),
        mask_t=sampled,
        behaviour_log_probs_t=np.where(sampled, -10.0, 0.0).astype(np.float32),
        raw_log_probs_t=np.zeros(length, np.float32),
        version_t=np.zeros(length, np.int32),
        finish_reason=FinishReason.LENGTH,
      )
      for i in range(work.group_size)
    )
    task = Prompt(prompt_id=str(group_id), messages=(), answer='')
    groups.append(
      Group(group_id=group_id, prompt=task, prompt_tokens=prompt, trajectories=trajectories)
    )
  return groups
