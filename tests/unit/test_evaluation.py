"""Accuracy and pass@k over scored groups, by hand."""

import numpy as np
import pytest

from rlax_stack.errors import RewardError
from rlax_stack.evaluation import evaluate_groups
from rlax_stack.types import FinishReason, Group, Message, Prompt, Reward, Source, Trajectory


def group(group_id, scores):
  """A group whose samples have the given scores; None is a verdict that failed."""
  prompt = Prompt(prompt_id='p', messages=(Message(role='user', content='?'),), answer='1')
  tokens = np.array([5, 6, 7], np.int32)
  source = np.array([Source.PROMPT, Source.POLICY, Source.POLICY], np.int8)
  trajectories = tuple(
    Trajectory(
      group_id=group_id,
      sample_index=i,
      prompt_id='p',
      tokens=tokens,
      source_t=source,
      mask_t=source == Source.POLICY,
      behaviour_log_probs_t=np.zeros(3, np.float32),
      raw_log_probs_t=np.zeros(3, np.float32),
      version_t=np.array([-1, 0, 0], np.int32),
      finish_reason=FinishReason.STOP,
      reward=Reward(value=None, failure='late')
      if score is None
      else Reward(value=score, parts={'number': score, 'format': 1.0}),
    )
    for i, score in enumerate(scores)
  )
  return Group(
    group_id=group_id, prompt=prompt, prompt_tokens=tokens[:1], trajectories=trajectories
  )


def test_accuracy_and_pass_at_k():
  result = evaluate_groups(
    [group(0, [1.0, 0.0, 0.0, 0.0]), group(1, [1.0, 1.0, 0.5, None])],
    label='number',
    correct_at=1.0,
    pass_at=(1, 2),
  )
  assert result.accuracy == pytest.approx(3 / 7)
  assert result.pass_at[1] == pytest.approx((1 / 4 + 2 / 3) / 2)
  # 1 - C(3, 2) / C(4, 2) = 1/2 and 1 - C(1, 2) / C(3, 2) = 1.
  assert result.pass_at[2] == pytest.approx((0.5 + 1.0) / 2)
  assert (result.num_samples, result.failed, result.response_length) == (8, 1, 2.0)


def test_no_verdict_at_all_is_an_error():
  with pytest.raises(RewardError, match='none of 2 held-out samples'):
    evaluate_groups([group(0, [None, None])], label='number', correct_at=1.0, pass_at=(1,))


def test_too_few_samples_for_k_is_nan():
  result = evaluate_groups([group(0, [1.0, None])], label='number', correct_at=1.0, pass_at=(2,))
  assert result.accuracy == 1.0 and np.isnan(result.pass_at[2])
