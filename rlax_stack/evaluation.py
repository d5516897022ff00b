"""Held-out evaluation: how many samples are right, and pass@k without bias. Pure, over scored groups."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlax_stack.errors import RewardError
from rlax_stack.observe.pass_at_k import mean_pass_at_k
from rlax_stack.types import Group


class Evaluation(NamedTuple):
  """`accuracy` is the share of correct samples, `pass_at` maps k to pass@k, both over verified samples.

  `response_length` is in sampled tokens, mean; `failed` counts samples that no verdict was had of.
  """

  accuracy: float
  pass_at: Mapping[int, float]
  response_length: float
  num_samples: int
  failed: int


def evaluate_groups(
  groups: Sequence[Group], *, label: str, correct_at: float, pass_at: Sequence[int]
) -> Evaluation:
  """Sums up scored groups.

  Args:
    groups: one per held-out prompt; every trajectory has a reward or a reward failure.
    label: the verifier whose score decides.
    correct_at: a sample is correct from this score on.
    pass_at: the k of pass@k; prompts with fewer verified samples than k do not count for it.

  Raises:
    RewardError: no sample at all was verified.
  """
  verdicts = [_verdicts(group, label, correct_at) for group in groups]
  verified = [verdict for group in verdicts for verdict in group]
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
  )


def _verdicts(group: Group, label: str, correct_at: float) -> list[bool]:
  rewards = [t.reward for t in group.trajectories if t.reward is not None]
  return [r.parts[label] >= correct_at for r in rewards if r.failure is None]


def _pass_at(verdicts: Sequence[Sequence[bool]], k: int) -> float:
  enough = [group for group in verdicts if len(group) >= k]
  if not enough:
    return float('nan')
  return mean_pass_at_k([len(group) for group in enough], [sum(group) for group in enough], k=k)
