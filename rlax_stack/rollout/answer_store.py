"""The latest answers to each prompt, which draft the answers of its next visit (SPEC-RL).

Drafts change no token, so what is stored here is a matter of speed alone: it is not saved with a run, and a worker that
starts anew has none. Invariant: at most `max_tokens` tokens are held; prompts that were visited longest ago go first.
See "SPEC-RL", https://arxiv.org/abs/2509.23232.
"""

import dataclasses
import hashlib
from collections import OrderedDict

import numpy as np

from rlax_stack.rollout.requests import FinishedSample, GenerationRequest


class AnswerStore:
  """Answers by prompt and sample index.

  Args:
    coupled: a prompt's samples draw with the same random numbers at every visit. As long as the policy gives nearly the
      same distributions, nearly all of a draft then stands; each visit's samples are still distributed as the policy of
      that visit says. Otherwise every visit draws anew, and a token of a draft stands with its own probability.
    max_tokens: held at most.
  """

  def __init__(self, *, coupled: bool, max_tokens: int = 2**24):
    self._coupled, self._max_tokens = coupled, max_tokens
    self._answers: OrderedDict[str, dict[int, np.ndarray]] = OrderedDict()
    self._num_tokens = 0

  @property
  def num_tokens(self) -> int:
    """Tokens held."""
    return self._num_tokens

  def drafted(self, request: GenerationRequest, prompt_id: str) -> GenerationRequest:
    """The request with the answer of the last visit as its draft, where there is one."""
    draft = self._answers.get(prompt_id, {}).get(request.sample_index)
    noise = prompt_noise(prompt_id) if self._coupled else request.rng_group_id
    return dataclasses.replace(request, draft_tokens=draft, rng_group_id=noise)

  def keep(self, sample: FinishedSample, prompt_id: str) -> None:
    """Holds an answer in place of the one before it."""
    answers = self._answers.setdefault(prompt_id, {})
    self._answers.move_to_end(prompt_id)
    before = answers.get(sample.request.sample_index)
    answers[sample.request.sample_index] = sample.tokens
    self._num_tokens += len(sample.tokens) - (0 if before is None else len(before))
    while self._num_tokens > self._max_tokens and len(self._answers) > 1:
      _, gone = self._answers.popitem(last=False)
      self._num_tokens -= sum(len(tokens) for tokens in gone.values())


def prompt_noise(prompt_id: str) -> int:
  """A number in [0, 2**31) that names the random numbers of a prompt, the same in every process."""
  return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=4).digest(), 'little') >> 1
