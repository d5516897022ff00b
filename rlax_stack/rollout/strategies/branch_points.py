"""Where a sample may be left by a branch, and which of these places are chosen."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rlax_stack.rng import numpy_rng
from rlax_stack.rollout.requests import FinishedSample
from rlax_stack.rollout.trajectory import step_ends


class Candidate(NamedTuple):
  """A place in a sample."""

  sample: int  # its index
  depth: int  # tokens after the prompt that come before it
  score: float  # of the token that was drawn there, or of the step


def candidates(
  sample: FinishedSample,
  index: int,
  taken: np.ndarray,
  *,
  at: str,
  by: str,
  separator: str,
  decode: Callable[[Sequence[int]], str],
) -> list[Candidate]:
  """The places in a sample's own tokens, its first one left out: leaving there is what it did itself.

  Args:
    sample: as it ended.
    index: of the sample.
    taken: int32 tokens after the prompt that it took over from others.
    at: 'token' takes every place, 'step' those where a step begins.
    by: 'entropy' scores places by that, 'attention' by what the token, or the step on average, gets from later tokens,
      everything else by surprisal.
    separator: what ends a step.
    decode: tokens -> text.
  """
  if by == 'attention':
    scores = _attention(sample)
  else:
    surprisal = -np.asarray(sample.raw_log_probs_t, np.float64)
    scores = entropies(sample) if by == 'entropy' else surprisal
  places = range(1, len(sample.tokens))
  if at == 'step':
    starts = step_starts(np.concatenate([taken, sample.tokens]), separator, decode)
    places = [place for place in places if place + len(taken) in starts]
    if by == 'attention':
      scores = _step_means(scores, places)
  return [Candidate(index, len(taken) + place, float(scores[place])) for place in places]


def choose(
  found: Sequence[Candidate], count: int, by: str, seed: tuple[int, ...]
) -> list[Candidate]:
  """Up to `count` of the candidates, the best first; those of equal scores in the order given.

  Args:
    found: of one tree.
    count: how many are wanted.
    by: 'surprisal', 'entropy' or 'attention' take the highest scores, 'mixed' draws in proportion to them, without
      replacement, 'random' draws, 'spread' takes every n-th.
    seed: run seed and what tells this choice from others.
  """
  if by == 'random':
    order = numpy_rng(seed[0], 'branch', *seed[1:]).permutation(len(found))
  elif by == 'mixed':
    # The largest of log score + Gumbel noise: each next one in proportion to the scores that are left.
    scores = np.maximum([candidate.score for candidate in found], 1e-12)
    noise = numpy_rng(seed[0], 'branch', *seed[1:]).gumbel(size=len(found))
    order = np.argsort(-(np.log(scores) + noise), kind='stable')
  elif by == 'spread':
    count = min(count, len(found))
    order = (np.arange(1, count + 1) * (len(found) + 1)) // (count + 1) - 1
  else:
    order = np.argsort([-candidate.score for candidate in found], kind='stable')
  return [found[i] for i in order[:count]]


def entropies(sample: FinishedSample) -> np.ndarray:
  """Entropy of the model's distribution at temperature 1 at every token, float64 [T], from below.

  H ≥ −Σ_k pₖ log pₖ − r log r: the K likeliest tokens, and what they leave (r) as if it were one token.
  """
  if sample.top_log_probs_t is None:
    raise ValueError('entropies need top_log_probs in the request, got none.')
  log_probs = np.asarray(sample.top_log_probs_t, np.float64)
  probs = np.exp(log_probs)
  rest = np.clip(1 - probs.sum(-1), 1e-12, 1.0)
  known = np.where(probs > 0, probs * np.maximum(log_probs, -1e4), 0.0)
  return -known.sum(-1) - rest * np.log(rest)


def _attention(sample: FinishedSample) -> np.ndarray:
  if sample.attention_t is None:
    raise ValueError('points by attention need attention_distance in the request, got 0.')
  return np.asarray(sample.attention_t, np.float64)


def _step_means(scores: np.ndarray, starts: Sequence[int]) -> np.ndarray:
  """Scores [T] with the mean of each step, to the next start or the end, at the place where it starts."""
  means = scores.copy()
  for start, end in itertools.pairwise([*starts, len(scores)]):
    means[start] = scores[start:end].mean()
  return means


def step_starts(
  tokens: np.ndarray, separator: str, decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
  """Numbers of tokens after which a step begins: the separator, and what repeats it, is then complete."""
  return step_ends(tokens, list(_ends(decode(tokens.tolist()), separator)), decode)


def _ends(text: str, separator: str) -> Iterator[int]:
  """Where in the text a run of separators ends."""
  place = text.find(separator)
  while place >= 0:
    end = place + len(separator)
    while text.startswith(separator, end):
      end += len(separator)
    yield end
    place = text.find(separator, end)
