"""A verifier beside the solver: it reads answers of a group and says of each whether it is correct.

Not for which weights play the verifier: its requests name a policy, and whoever has the engines gives them to one.
Invariant: a verdict depends on the answer's text and on its own identity, never on when it was asked for.
"""

import dataclasses
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from rlax_stack.errors import ConfigError, PromptTooLongError
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.plan import Limits, Plan, Task
from rlax_stack.rollout.trajectory import make_trajectory
from rlax_stack.types import Message, Prompt, Reward, SamplingParams, Trajectory

VERIFIER = 'verifier'  # the role
FIELDS = ('question', 'answer')  # of the template

Score = Callable[[Sequence[str], Sequence[Prompt]], list[Reward]]


class VerifierTokenizer(Protocol):
  """What a verifier needs of models/tokenizer.py."""

  def encode_chat(self, messages: Sequence[Message]) -> np.ndarray:
    """Tokens of a prompt, int32 [P]."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdicts:
  """The first `answers` samples of a group are each judged `verdicts` times by a verifier.

  Samples 0 .. group_size − 1 are the solver's; sample group_size + k · verdicts + j is the j-th verdict on answer k.
  A verifier is rewarded by agreement with the rule, r = 1[verdict = rule's outcome], and the solver by
  r = r_chain + weight · (share of its verdicts that say correct). Both are trained at every step.
  See "RL Tango", Zha et al. (https://arxiv.org/abs/2505.15034): its verifier, too, learns from the outcome alone, and
  speaks step by step, where this one says a word of each whole answer.

  Options:
    group_size: answers drawn.
    answers: of them are judged, the first ones.
    verdicts: on each.
    policy: that plays the verifier, '' for the solver's own.
    tokenizer: of that policy.
    sampling: of verdicts.
    max_prompt_tokens: of what a verifier is asked; an answer too long for it loses its beginning.
    template: of the user's turn, with {question} and {answer}.
    words: that a verdict ends with, where the answer is correct and where it is not.
    label: part of the reward that says what the rule finds.
    correct_at: the least score of it that is correct.
    weight: of verdicts in the solver's reward.
  """

  group_size: int
  answers: int
  verdicts: int
  policy: str
  tokenizer: VerifierTokenizer
  sampling: SamplingParams
  max_prompt_tokens: int
  template: str
  words: tuple[str, str]
  label: str
  correct_at: float
  weight: float

  @property
  def for_evaluation(self) -> Independent:
    """Held-out answers are not judged."""
    return Independent()

  @property
  def num_samples(self) -> int:
    """Of a group, all roles together."""
    return self.group_size + self.answers * self.verdicts

  def limits(self, max_tokens: int) -> Limits:
    """A sample of the solver is one request."""
    return Independent().limits(max_tokens)

  def problems(self, group_size: int) -> Iterator[str]:
    """More answers to judge than there are."""
    if self.answers > group_size:
      yield f'answers={self.answers} of a group of {group_size} cannot be judged. Lower it.'

  def plan(self, task: Task) -> Plan:
    """Answers first; each is judged as soon as it is there."""
    return _VerdictsPlan(self, task)

  def asked(self, prompt: Prompt, index: int, answer: str) -> Prompt:
    """What a verifier is asked of an answer."""
    question = '\n'.join(m.content for m in prompt.messages if m.role == 'user')
    text = self.template.format(question=question, answer=answer)
    return Prompt(
      prompt_id=f'{prompt.prompt_id}/{VERIFIER}/{index}',
      messages=(Message(role='user', content=text),),
      answer=prompt.answer,
      metadata={'role': VERIFIER},
    )

  def fitting(self, prompt: Prompt, index: int, answer: str) -> tuple[Prompt, np.ndarray]:
    """What is asked of as much of the answer's end as fits, and its tokens, int32 [P].

    Raises:
      PromptTooLongError: it does not fit without any answer.
    """

    def tail(length: int) -> tuple[Prompt, np.ndarray]:
      asked = self.asked(prompt, index, answer[len(answer) - length :])
      return asked, np.asarray(self.tokenizer.encode_chat(asked.messages), np.int32)

    most = self.max_prompt_tokens
    whole = tail(len(answer))
    if len(whole[1]) <= most:
      return whole
    best, low, high = tail(0), 0, len(answer) - 1
    if len(best[1]) > most:
      raise PromptTooLongError(
        f"prompt {prompt.prompt_id} has {len(best[1])} tokens in the verifier's template, more than "
        f'config.roles.max_prompt_tokens={most}. Raise it.'
      )
    while low < high:
      length = (low + high + 1) // 2
      tried = tail(length)
      if len(tried[1]) <= most:
        best, low = tried, length
      else:
        high = length - 1
    return best

  def verdict(self, text: str) -> bool | None:
    """Whether a verdict says that the answer is correct: by the last of the two words in it, None without any."""
    correct, wrong = (word.casefold() for word in self.words)
    either = rf'(?<!\w)(?:{re.escape(correct)}|{re.escape(wrong)})(?!\w)'
    found = re.findall(either, text.casefold())
    return found[-1] == correct if found else None

  def scorer(self, score: Score) -> Score:
    """Scores the samples of a whole group in order of their index; `score` is the rule, for answers."""

    def of_group(texts: Sequence[str], prompts: Sequence[Prompt]) -> list[Reward]:
      if len(texts) != self.num_samples:
        raise ValueError(f'a group has {self.num_samples} samples here, got {len(texts)} texts.')
      solved = score(texts[: self.group_size], prompts[: self.group_size])
      said = [self.verdict(text) for text in texts[self.group_size :]]
      by_answer = [said[k * self.verdicts : (k + 1) * self.verdicts] for k in range(self.answers)]
      judged = [self._solver_reward(r, s) for r, s in zip(solved, by_answer, strict=False)]
      verdicts = [
        self._verifier_reward(reward, verdict)
        for reward, of_answer in zip(solved, by_answer, strict=False)
        for verdict in of_answer
      ]
      return [*judged, *solved[self.answers :], *verdicts]

    return of_group

  def _solver_reward(self, reward: Reward, said: Sequence[bool | None]) -> Reward:
    share = sum(verdict is True for verdict in said) / len(said)
    value = None if reward.value is None else reward.value + self.weight * share
    return dataclasses.replace(reward, value=value, parts={**reward.parts, VERIFIER: share})

  def _verifier_reward(self, reward: Reward, verdict: bool | None) -> Reward:
    parts = {'verdict': float(verdict is not None)}
    if reward.value is None:
      return Reward(value=None, parts=parts, failure=f'the rule failed: {reward.failure}')
    correct = reward.parts[self.label] >= self.correct_at
    parts |= {'answer_correct': float(correct), 'agreement': float(verdict is correct)}
    return Reward(value=parts['agreement'], parts=parts)


class _VerdictsPlan:
  """See Verdicts."""

  def __init__(self, strategy: Verdicts, task: Task):
    self._strategy, self._task = strategy, task
    self._asked: dict[int, Prompt] = {}

  def start(self) -> list[GenerationRequest]:
    """The answers."""
    return [self._task.request(i) for i in range(self._strategy.group_size)]

  def take(self, sample: FinishedSample) -> tuple[list[GenerationRequest], list[Trajectory]]:
    """Its trajectory; for an answer that is judged, the requests for verdicts too."""
    index, strategy, task = sample.request.sample_index, self._strategy, self._task
    if index >= strategy.group_size:
      asked = self._asked[(index - strategy.group_size) // strategy.verdicts]
      made = make_trajectory(sample, prompt_id=asked.prompt_id)
      return [], [dataclasses.replace(made, role=VERIFIER, asked=asked)]
    answered = make_trajectory(sample, prompt_id=task.prompt.prompt_id)
    if index >= strategy.answers:
      return [], [answered]
    text = task.tokenizer.decode(sample.tokens.tolist())
    self._asked[index], tokens = strategy.fitting(task.prompt, index, text)
    first = strategy.group_size + index * strategy.verdicts
    requests = [
      GenerationRequest(
        group_id=task.group_id,
        sample_index=first + j,
        prompt_tokens=tokens,
        sampling=strategy.sampling,
        policy=strategy.policy,
      )
      for j in range(strategy.verdicts)
    ]
    return requests, [answered]


def check_template(template: str) -> None:
  """Raises ConfigError unless the template has the fields of FIELDS, and no others."""
  try:
    fields = [field for _, field, *_ in string.Formatter().parse(template) if field is not None]
  except ValueError as error:
    raise ConfigError(
      f'config.roles.template cannot be read: {error}. Write {{{{ for a brace.'
    ) from error
  if sorted(set(fields)) != sorted(FIELDS):
    raise ConfigError(
      f'config.roles.template needs {{question}} and {{answer}} and nothing else in braces, got the fields {fields}.'
    )
