"""What a trajectory says of itself."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.types import KEPT_OVERFLOW, FinishReason, Source, Trajectory


def _trajectory(source_t, version_t):
  length = len(source_t)
  zeros = np.zeros(length, np.float32)
  source_t = np.asarray(source_t, np.int8)
  return Trajectory(
    group_id=7,
    sample_index=2,
    prompt_id='p',
    tokens=np.arange(length, dtype=np.int32),
    source_t=source_t,
    mask_t=source_t == Source.POLICY,
    behaviour_log_probs_t=zeros,
    raw_log_probs_t=zeros,
    version_t=np.asarray(version_t, np.int32),
    finish_reason=FinishReason.STOP,
  )


def test_identity_count_and_versions():
  policy, prompt, tool = Source.POLICY, Source.PROMPT, Source.ENV
  trajectory = _trajectory([prompt, policy, tool, policy], [-1, 5, -1, 4])
  assert trajectory.trajectory_id == '7/2'
  assert trajectory.num_sampled == 2
  assert (trajectory.oldest_version, trajectory.newest_version) == (4, 5)


def test_nothing_sampled():
  trajectory = _trajectory([Source.PROMPT], [3])
  assert trajectory.num_sampled == 0
  assert (trajectory.oldest_version, trajectory.newest_version) == (-1, -1)


def test_tokens_whose_kept_set_had_no_room():
  policy, prompt = Source.POLICY, Source.PROMPT
  trajectory = _trajectory([prompt, policy, policy, policy], [-1, 0, 0, 0])
  assert not trajectory.kept_overflow_t.any() and trajectory.kept_overflow_t.shape == (4,)
  kept = np.array([[-1, -1], [3, -1], [KEPT_OVERFLOW, -1], [-1, -1]], np.int32)
  trajectory = dataclasses.replace(trajectory, kept_ids_t=kept)
  np.testing.assert_array_equal(trajectory.kept_overflow_t, [False, False, True, False])


def test_frozen():
  with pytest.raises(AttributeError):
    _trajectory([Source.PROMPT], [3]).group_id = 1
