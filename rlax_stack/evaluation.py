"""Held-out evaluation: how many samples are right, pass@k without bias, and what votes of a prompt's samples give.

Pure, over scored groups.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlax_stack.errors import RewardError
from rlax_stack.observe.pass_at_k import mean_pass_at_k
from rlax_stack.rewards import extract
from rlax_stack.types import Group, Source, Trajectory

# What of a text is voted on; 'number' is equal for 1.0 and 1.
VOTES: dict[str, Callable[[str], Hashable]] = {
  'number': extract.answer_number,
  **{
    how: lambda text, how=how: extract.extract_answer(text, how)
    for how in extract.EXTRACTIONS
    if how != 'marker'
  },
}


class Vote(NamedTuple):
  """Shares of prompts that are answered right when all verified samples of a prompt speak as one.

  `majority`: by the answer most of them give. `weighted`: by the answer with the largest sum of exp(mean log-prob of a
  token). `best_of_n`: by the sample with the largest mean log-prob. Samples without an answer have no voice.
  """

  majority: float
  weighted: float
  best_of_n: float


class Evaluation(NamedTuple):
  """`accuracy` is the share of correct samples, `pass_at` maps k to pass@k, both over verified samples.

  `response_length` is in sampled tokens, mean; `failed` counts samples that no verdict was had of. `vote` is None where
  none was asked for.
  """

  accuracy: float
  pass_at: Mapping[int, float]
  response_length: float
  num_samples: int
  failed: int
  vote: Vote | None = None


def evaluate_groups(
  groups: Sequence[Group],
  *,
  label: str,
  correct_at: float,
  pass_at: Sequence[int],
  vote: str = 'none',
) -> Evaluation:
  """Sums up scored groups.

  Args:
    groups: one per held-out prompt; every trajectory has a reward or a reward failure.
    label: the verifier whose score decides.
    correct_at: a sample is correct from this score on.
    pass_at: the k of pass@k; prompts with fewer verified samples than k do not count for it.
    vote: what of a text is voted on, a key of VOTES, or 'none'.

  Raises:
    RewardError: no sample at all was verified.
  """
  verdicts = [_verdicts(group, label, correct_at) for group in groups]
  verified = [verdict for group in verdicts for _, verdict in group]
  total = sum(len(group.trajectories) for group in groups)
  if not verified:
    raise RewardError(
      f'none of {total} held-out samples could be verified. See the failures in samples/, and check '
      'config.rewards.verifiers.'
    )
  lengths = [t.num_sampled for group in groups for t in group.trajectories]
  return Evaluation(
    accuracy=sum(verified) / len(verified),
    pass_at={k: _pass_at(verdicts, k) for k in pass_at},
    response_length=sum(lengths) / len(lengths),
    num_samples=total,
    failed=total - len(verified),
    vote=None
    if vote == 'none'
    else _mean_vote([group for group in verdicts if group], VOTES[vote]),
  )


_Verdicts = Sequence[tuple[Trajectory, bool]]


def _verdicts(group: Group, label: str, correct_at: float) -> list[tuple[Trajectory, bool]]:
  return [
    (t, t.reward.parts[label] >= correct_at)
    for t in group.trajectories
    if t.reward is not None and t.reward.failure is None
  ]


def _pass_at(verdicts: Sequence[_Verdicts], k: int) -> float:
  enough = [[verdict for _, verdict in group] for group in verdicts if len(group) >= k]
  if not enough:
    return float('nan')
  return mean_pass_at_k([len(group) for group in enough], [sum(group) for group in enough], k=k)


def _mean_vote(verdicts: Sequence[_Verdicts], answer_of: Callable[[str], Hashable]) -> Vote:
  votes = [_vote(group, answer_of) for group in verdicts]
  return Vote(*(sum(values) / len(votes) for values in zip(*votes, strict=True)))


def _vote(verdicts: _Verdicts, answer_of: Callable[[str], Hashable]) -> Vote:
  """The chance that each way is right on one prompt: where answers tie, one of them is drawn."""
  answers = [answer_of(trajectory.text) for trajectory, _ in verdicts]
  confidence = [_confidence(trajectory) for trajectory, _ in verdicts]
  right: dict[Hashable, list[bool]] = {}
  voices: dict[Hashable, list[float]] = {}
  for answer, (_, verdict), log_prob in zip(answers, verdicts, confidence, strict=True):
    if answer is not None:
      right.setdefault(answer, []).append(verdict)
      voices.setdefault(answer, []).append(math.exp(log_prob))

  def winner(weight: Callable[[list[float]], float]) -> float:
    weights = {answer: weight(of) for answer, of in voices.items()}
    best = [a for a, w in weights.items() if math.isclose(w, max(weights.values()))]
    return float(np.mean([np.mean(right[answer]) for answer in best])) if best else 0.0

  return Vote(winner(len), winner(math.fsum), float(verdicts[int(np.argmax(confidence))][1]))


def _confidence(trajectory: Trajectory) -> float:
  """Mean log-prob of the sampled tokens at temperature 1."""
  sampled = np.asarray(trajectory.source_t) == Source.POLICY
  values = np.asarray(trajectory.raw_log_probs_t, np.float64)[sampled]
  return float(values.mean()) if values.size else -math.inf
