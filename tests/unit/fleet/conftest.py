"""Makers of prompts, trajectories, a clock that stands still, and a coordinator over them."""

import numpy as np
import pytest

from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.types import FinishReason, Message, Prompt, Reward, Source, Trajectory


class Clock:
  """Seconds that only move when told to."""

  def __init__(self):
    self.now_s = 100.0

  def __call__(self):
    return self.now_s


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def make_trajectory():
  def make(
    lease, index, *, versions=None, value=1.0, failure=None, reason=FinishReason.STOP, prompt=(7, 8)
  ):
    versions = [lease.min_version] * 2 if versions is None else versions
    size = len(prompt) + len(versions)
    source_t = np.array([Source.PROMPT] * len(prompt) + [Source.POLICY] * len(versions), np.int8)
    return Trajectory(
      group_id=lease.group_id,
      sample_index=index,
      prompt_id=lease.prompt.prompt_id,
      tokens=np.array([*prompt, *range(len(versions))], np.int32),
      source_t=source_t,
      mask_t=source_t == Source.POLICY,
      behaviour_log_probs_t=np.zeros(size, np.float32),
      raw_log_probs_t=np.zeros(size, np.float32),
      version_t=np.array([-1] * len(prompt) + list(versions), np.int32),
      finish_reason=reason,
      reward=Reward(value=None if failure else value, failure=failure),
    )

  return make


@pytest.fixture
def make_group(make_trajectory):
  """All samples of a lease; `failed` indices have a failed verdict."""

  def make(lease, *, failed=(), **options):
    return [
      make_trajectory(lease, i, failure='timed out' if i in failed else None, **options)
      for i in range(lease.num_samples)
    ]

  return make


class Prompts:
  """Prompts '0', '1', ... up to `end`; `index` is the iterator's state."""

  def __init__(self, end=10**9):
    self.index = 0
    self.end = end

  def __call__(self):
    if self.index >= self.end:
      raise StopIteration
    self.index += 1
    name = str(self.index - 1)
    return Prompt(
      prompt_id=name,
      messages=(Message(role='user', content=f'what is {name}?'),),
      answer=name,
      metadata={'n': [1, 2]},
    )


@pytest.fixture
def make_coordinator(clock):
  def make(*, end=10**9, prompts=None, **options):
    prompts = Prompts(end) if prompts is None else prompts
    defaults = dict(
      group_size=3,
      groups_per_batch=2,
      max_staleness=0,
      lease_timeout_s=10.0,
      max_reward_failure_fraction=1.0,
      clock=clock,
      prompt_state=lambda: prompts.index,
    )
    return Coordinator(prompts, **(defaults | options))

  return make
