"""Trees of samples: some are drawn from the prompt, the others leave one of those at a chosen token."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import numpy as np

from rlax_stack.data.prompt_history import HistorySettings
from rlax_stack.data.success_model import prefix_features, success_probability
from rlax_stack.objectives.boxes import Range
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.strategies.branch_points import Candidate, candidates, choose
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.plan import Limits, Plan, Task
from rlax_stack.rollout.trajectory import Span, sampled_span
from rlax_stack.types import Branch, FinishReason, Trajectory

_ENTROPY_TOKENS = 20  # likeliest tokens that an entropy is summed over


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
  """`roots` samples from the prompt; the rest of the group in equal parts as branches of theirs.

  A round begins when all samples of a tree have ended: points are chosen among the tokens that the tree's samples drew
  themselves, and `per_point` branches leave at each, drawing that token anew. The tokens before it keep the log-probs
  and versions they were sampled with; branches of one point share the KV of them. A tree without a point, because its
  samples are too short, branches at the prompt.
  Chosen by surprisal, −log p of the token that was drawn: "TreeRL", Hou et al. (https://arxiv.org/abs/2506.11902). By
  entropy: CURE (Li et al., https://arxiv.org/abs/2508.11016). Random steps: "Tree Search for LLM Agent Reinforcement
  Learning", Ji et al. (https://arxiv.org/abs/2509.21240). By the attention that later tokens pay, rⱼ = mean over layers
  and heads of Σᵢ αᵢⱼ over i ≥ j + distance: the idea of "Attention as a Compass" (https://arxiv.org/abs/2509.26628);
  here a step scores the mean of its tokens. Mixed, so that outcomes of a group differ: drawn in proportion to
  p (1 − p), p the chance of success after the tokens up to there, as a model learnt from the run's own outcomes tells
  it; all trees and the prompt itself share the branches, the idea of "TRACE", Zou et al.
  (https://arxiv.org/abs/2606.11119). Spread steps that are Monte-Carlo rollouts: "VinePPO",
  Kazemnejad et al. (https://arxiv.org/abs/2410.01679).

  Options:
    roots: trees of a group; divides group_size, save by='mixed'.
    rounds: times that each tree grows.
    at: 'token' anywhere, or 'step' where a step of the text begins.
    by: 'surprisal', 'entropy' or 'attention' (the highest), 'mixed' (drawn, see above), 'random', or 'spread' (evenly
      over the tree's candidates).
    per_point: branches that leave at one point.
    trains: 'leaves' every sample whole, so that a token shared by k samples counts k times; 'own' only what a sample
      drew itself; 'roots' no branch at all: they only tell what the states they left are worth.
    separator: what ends a step.
    distance: by='attention' counts what tokens at least so much later pay.
  """

  roots: Annotated[int, Range(1)] = 2
  rounds: Annotated[int, Range(1)] = 1
  at: Literal['token', 'step'] = 'token'
  by: Literal['surprisal', 'entropy', 'attention', 'mixed', 'random', 'spread'] = 'surprisal'
  per_point: Annotated[int, Range(1)] = 1
  trains: Literal['leaves', 'own', 'roots'] = 'leaves'
  separator: str = '\n\n'
  distance: Annotated[int, Range(1)] = 4

  @property
  def for_evaluation(self) -> Independent:
    """Held-out samples are independent."""
    return Independent()

  def limits(self, max_tokens: int) -> Limits:
    """A branch leaves after all but one token at most."""
    return Limits(
      prefix=max_tokens - 1,
      request=max_tokens,
      context=max_tokens,
      span=max_tokens,
      top_log_probs=_ENTROPY_TOKENS if self.by == 'entropy' else 0,
      history=HistorySettings(success=True, max_tokens=max_tokens) if self._shares else None,
    )

  @property
  def _shares(self) -> bool:
    """Whether all trees of a group share its branches."""
    return self.by == 'mixed'

  def pools(self) -> int:
    """Parts of a group within which branches are given out."""
    return 1 if self._shares else self.roots

  def problems(self, group_size: int) -> Iterator[str]:
    """Groups that do not divide into trees."""
    if self._shares and group_size < self.roots + self.rounds:
      yield (
        f'roots={self.roots} of config.rollout.group_size={group_size} samples leave no branch for each of '
        f'rounds={self.rounds}. Lower one of them, or raise config.rollout.group_size.'
      )
    elif self._shares:
      pass
    elif group_size % self.roots or group_size < 2 * self.roots:
      yield (
        f'roots={self.roots} must divide config.rollout.group_size={group_size} into trees of 2 or '
        'more samples.'
      )
    elif self.rounds > group_size // self.roots - 1:
      yield (
        f'a tree of {group_size // self.roots} samples has no branch for each of rounds={self.rounds}. '
        'Lower it, or raise config.rollout.group_size.'
      )
    if self.at == 'step' and not self.separator:
      yield "at='step' needs a separator that is not empty."

  def plan(self, task: Task) -> Plan:
    """The plan of one group."""
    return _TreePlan(self, task)


class _Branching(NamedTuple):
  """A branch on its way."""

  branch: Branch
  spans: tuple[Span, ...]  # what it took over


class _TreePlan:
  """See Tree. Samples [0, roots) are the roots, then come the branches of the first pool, of the second, and so on."""

  def __init__(self, strategy: Tree, task: Task):
    self._strategy, self._task = strategy, task
    pools = strategy.pools()  # a tree each, or one of all trees
    self._branches = (task.group_size - strategy.roots) // pools  # of each pool
    self._pending = collections.Counter(i % pools for i in range(strategy.roots))  # still drawn
    self._rounds = collections.Counter[int]()  # rounds that a pool has begun
    self._root = {i: i for i in range(strategy.roots)}  # of the tree that a sample belongs to
    self._spans: dict[int, dict[int, tuple[Span, ...]]] = {i: {} for i in self._pending}
    self._candidates: dict[int, dict[int, list[Candidate]]] = {i: {} for i in self._pending}
    self._under_way: dict[int, _Branching] = {}

  def start(self) -> list[GenerationRequest]:
    """The roots."""
    extras = [self._request(i) for i in self._task.extras]
    return extras + [self._request(i, grows=True) for i in range(self._strategy.roots)]

  def take(self, sample: FinishedSample) -> tuple[list[GenerationRequest], list[Trajectory]]:
    """The sample's trajectory, and the branches of the next round once its tree is complete."""
    index, strategy = sample.request.sample_index, self._strategy
    under_way = self._under_way.pop(index, None)
    branch = under_way.branch if under_way else None
    before = under_way.spans if under_way else ()
    trained = branch is None or strategy.trains != 'roots'
    spans = (*before, sampled_span(sample, trained=trained))
    done = [self._task.trajectory(index, spans, sample.finish_reason, branch)]
    if index in self._task.extras:
      return [], done
    pool = self._pool(self._root[index])
    self._spans[pool][index] = spans
    self._candidates[pool][index] = self._found(sample, index, before) if self._grows(pool) else []
    self._pending[pool] -= 1
    return [] if self._pending[pool] else self._grow(pool), done

  def _pool(self, root: int) -> int:
    return root % self._strategy.pools()

  def _grows(self, pool: int) -> bool:
    """Whether a round is still to begin."""
    return self._rounds[pool] < self._strategy.rounds

  def _found(self, sample: FinishedSample, index: int, before: tuple[Span, ...]) -> list[Candidate]:
    """The points that a sample offers; one that was cancelled offers none."""
    if sample.finish_reason == FinishReason.ABORT:
      return []
    strategy = self._strategy
    found = candidates(
      sample,
      index,
      _tokens(before),
      at=strategy.at,
      by=strategy.by,
      separator=strategy.separator,
      decode=self._task.tokenizer.decode,
    )
    if strategy.by != 'mixed':
      return found
    log_probs = np.concatenate([*(span.raw_log_probs_t for span in before), sample.raw_log_probs_t])
    return self._mixed(found, log_probs)

  def _mixed(self, found: list[Candidate], log_probs: np.ndarray) -> list[Candidate]:
    """The candidates with p (1 − p) as their score, p their chance of success."""
    past, depths = self._task.past, np.array([c.depth for c in found], np.int64)
    if past.success_weights is None:
      raise ValueError(
        "points by='mixed' need the weights of a success model in the task, got None."
      )
    limit = self._task.samplings[0].max_tokens
    features = prefix_features(log_probs, depths, rate=past.success_rate, max_tokens=limit)
    chance = success_probability(past.success_weights, features)
    scores = (chance * (1 - chance)).tolist()
    return [c._replace(score=score) for c, score in zip(found, scores, strict=True)]

  def _grow(self, pool: int) -> list[GenerationRequest]:
    """The branches of a pool's next round."""
    strategy, number = self._strategy, self._rounds[pool]
    if not self._grows(pool):
      return []
    self._rounds[pool] += 1
    # Rounds of equal sizes, the first ones one larger where they do not divide.
    edges = [-(-self._branches * n // strategy.rounds) for n in (number, number + 1)]
    count = edges[1] - edges[0]
    found = [c for _, part in sorted(self._candidates[pool].items()) for c in part]
    if strategy.by == 'mixed':
      found = self._mixed([Candidate(pool, 0, 0.0)], np.zeros(0)) + found
    seed = (self._task.samplings[pool].seed or 0, self._task.group_id, pool, number)
    points = choose(found, -(-count // strategy.per_point), strategy.by, seed)
    points = points or [Candidate(pool, 0, 0.0)]
    first = strategy.roots + pool * self._branches + edges[0]
    requests = []
    for offset in range(count):
      point = points[offset // strategy.per_point % len(points)]
      requests.append(self._leave(first + offset, pool, point))
    self._pending[pool] += count
    return requests

  def _leave(self, index: int, pool: int, point: Candidate) -> GenerationRequest:
    """Sample `index` leaves another at a point."""
    root = self._root[index] = self._root[point.sample]
    trained, left, taken = self._strategy.trains == 'leaves', point.depth, []
    for span in self._spans[pool][point.sample]:
      taken.append(span.first(left, trained=trained))
      left -= len(taken[-1].tokens)
    taken = tuple(span for span in taken if len(span.tokens))
    length = len(self._task.prompt_tokens) + point.depth
    self._under_way[index] = _Branching(Branch(root, point.sample, length), taken)
    return self._request(index, taken, point.depth, grows=self._grows(pool))

  def _request(
    self, index: int, taken: tuple[Span, ...] = (), used: int = 0, *, grows: bool = False
  ) -> GenerationRequest:
    """A request for sample `index`; `grows` says whether branches may leave it."""
    strategy = self._strategy
    return self._task.request(
      index,
      after=_tokens(taken),
      used=used,
      top_log_probs=strategy.limits(1).top_log_probs,
      attention_distance=strategy.distance if grows and strategy.by == 'attention' else 0,
    )


def _tokens(spans: tuple[Span, ...]) -> np.ndarray:
  return np.concatenate([np.zeros(0, np.int32), *(span.tokens for span in spans)])
