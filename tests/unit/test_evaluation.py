"""Accuracy and pass@k over scored groups, by hand."""

import numpy as np
import pytest

from rlax_stack.errors import RewardError
from rlax_stack.evaluation import VOTES, Vote, evaluate_groups
from rlax_stack.types import FinishReason, Group, Message, Prompt, Reward, Source, Trajectory


def group(group_id, scores, texts=None, log_probs=None):
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
      raw_log_probs_t=np.array([0.0, *(log_probs[i] if log_probs else (0, 0))], np.float32),
      text=texts[i] if texts else '',
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


def _votes(*groups, vote='number'):
  return evaluate_groups(list(groups), label='number', correct_at=1.0, pass_at=(1,), vote=vote).vote


def test_votes_by_hand():
  texts = ['so 4', 'it is 5', '4.0', 'no idea', 'is it 5?', '4']
  scores = [1.0, 0.0, 1.0, 0.0, 0.0, None]
  # exp of the mean log-prob: the two that say 4 weigh 0.2 each, those that say 5 weigh 0.1 and 0.5.
  weights = [0.2, 0.1, 0.2, 0.9, 0.5, 1.0]
  log_probs = [(2 * np.log(w), 0.0) for w in weights]
  one = group(0, scores, texts, log_probs)
  # Two say 4 and two say 5: right with chance 1/2. By weight 5 wins. The likeliest sample has no answer.
  assert _votes(one) == Vote(majority=0.5, weighted=0.0, best_of_n=0.0)
  # One more that says 4 decides it.
  more = group(1, [1.0, *scores], ['4', *texts], [(2 * np.log(0.95), 0.0), *log_probs])
  assert _votes(more) == Vote(majority=1.0, weighted=1.0, best_of_n=1.0)
  assert _votes(one, more) == Vote(majority=0.75, weighted=0.5, best_of_n=0.5)
  # Texts as they are: '4' and '4.0' are two answers.
  assert _votes(one, vote='text').majority == pytest.approx(2 / 5)
  assert _votes(group(0, [1.0, 1.0], ['none', 'at all'])).majority == 0.0


def test_nothing_is_voted_on_unless_asked():
  result = evaluate_groups([group(0, [1.0])], label='number', correct_at=1.0, pass_at=(1,))
  assert result.vote is None
  assert set(VOTES) == {'number', 'text', 'last_line', 'boxed', 'tag'}
  assert VOTES['boxed'](r'so \boxed{x + 1}') == 'x + 1'
