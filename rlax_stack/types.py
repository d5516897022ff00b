"""The words of the project as frozen data: prompts, trajectories, groups, packed rows, sampling
parameters.

Only numpy here, no jax, so that reward processes and tools import it cheaply. Arrays are never
mutated after construction. The suffix `_t` means one value per token; no suffix means one per
sequence.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

KEPT_OVERFLOW = -2  # first of a token's kept ids where its kept set had no room


class Source(enum.IntEnum):
  """Who wrote a token (`source_t`)."""

  PROMPT = 0  # the task
  POLICY = 1  # sampled by us: the only tokens trained on by default
  ENV = 2  # a tool, an observation, a user turn
  GUIDE = 3  # a hint, a teacher, a replayed prefix


class FinishReason(enum.StrEnum):
  """Why a sample ended."""

  STOP = 'stop'  # a stop token was sampled (it is part of the trajectory)
  STOP_STRING = 'stop_string'  # a stop string was completed (its tokens are part of the trajectory)
  LENGTH = 'length'  # max_tokens reached: truncated
  ABORT = 'abort'  # cancelled from outside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
  """One turn of a chat. `role` is 'system', 'user' or 'assistant'."""

  role: str
  content: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One task. `prompt_id` is stable across epochs and restarts.

  `messages` are rendered by the model's chat template; `answer` and `metadata` are for the
  verifiers. `metadata` holds JSON values only.
  """

  prompt_id: str
  messages: tuple[Message, ...]
  answer: str
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """How one request is sampled.

  temperature: 0 means greedy. top_k: 0 means off. top_p: 1 means off. min_p: 0 means off (else
  tokens below min_p times the largest probability are removed). max_tokens: sampled tokens at most,
  stop token included. stop_token_ids end a sample and belong to it; stop_strings end it at the
  token that completes the string. min_tokens: no stop before that many. seed: None takes the run's seed.

  repetition_penalty (1 is off) divides the positive logits of tokens in the prompt or the sample and multiplies
  negative ones; presence_penalty and frequency_penalty (0 is off) are subtracted from tokens of the sample, once
  and per occurrence; logit_bias adds to the logits of (token, bias). They change the distribution that is sampled
  and its log-probs, never the raw ones. top_log_probs: how many of the likeliest tokens come back per position.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  min_tokens: int = 0
  max_tokens: int = 64
  top_log_probs: int = 0
  stop_token_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
  """What the verifiers said of one sample.

  `value` is None exactly when `failure` says why a verifier could not answer; such a sample is
  dropped and counted, never scored 0. `parts` holds each verifier's own score by name.

  Process rewards: `step_values` are the shares of `value` that belong to single steps of the sample,
  in order; what they leave of `value` is due at its end. `step_ends` says where in the text each of
  them ends, in characters; empty where a step is a turn.
  """

  value: float | None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  failure: str | None = None
  step_values: tuple[float, ...] = ()
  step_ends: tuple[int, ...] = ()


class Branch(NamedTuple):
  """Where a sample left another one of its group."""

  root: int  # sample index of the tree's first sample
  parent: int  # sample index of the one it left
  length: int  # leading tokens that it took over from it, those of the prompt included


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
  """One sample: the prompt's tokens and everything after them, in token space, never re-tokenised.

  All arrays have shape [T]. `behaviour_log_probs_t` are of the processed distribution that was
  sampled (temperature, top-k, top-p, min-p applied), `raw_log_probs_t` of the model's own at
  temperature 1; both f32, 0 where no policy drew the token. `version_t` is the weights version that
  made the token, -1 where none did. A turn is an uninterrupted run of POLICY tokens.

  At every index of `context_starts` the context was set back to the prompt: the tokens from there on
  saw the prompt and, up to the next such index, each other. What is repeated there is GUIDE.

  `kept_ids_t` [T, K] holds the kept set of each token: the ids that top-k, top-p and min-p left it to be
  drawn from, likeliest first, filled with -1. All -1: the whole vocabulary, as for tokens that were not
  sampled. A set of more than K ids is KEPT_OVERFLOW and then -1; such a token is not trained on.

  `experts_t` [T, L, k] holds the experts of each layer that a token went through on its way to the next one, as they
  were first chosen; -1 where nothing is known, as for the last token.

  A sample of another role than the one that the prompt was given to has its `role` and what it was `asked`.
  """

  group_id: int
  sample_index: int
  prompt_id: str
  tokens: np.ndarray  # int32
  source_t: np.ndarray  # int8, values of Source
  mask_t: np.ndarray  # bool, True where trained on
  behaviour_log_probs_t: np.ndarray  # float32
  raw_log_probs_t: np.ndarray  # float32
  version_t: np.ndarray  # int32
  finish_reason: FinishReason
  text: str = ''  # decoded sampled tokens, for rewards and people
  reward: Reward | None = None
  step_ends: tuple[int, ...] = ()  # tokens up to the end of each step of reward.step_ends
  roles: tuple[str, ...] = ()  # agent of each turn; empty where there is but one
  context_starts: tuple[int, ...] = ()  # ascending, after the prompt; empty: one context
  branch: Branch | None = None  # None: drawn from the prompt on
  kept_ids_t: np.ndarray | None = None  # int32 [T, K], None where no sets were recorded
  experts_t: np.ndarray | None = None  # int16 [T, L, k], None where no experts were recorded
  role: str = ''  # who it is a sample of, where several roles take part
  asked: Prompt | None = None  # None: the group's prompt

  @property
  def trajectory_id(self) -> str:
    """Identity in the ledger."""
    return f'{self.group_id}/{self.sample_index}'

  @property
  def oldest_version(self) -> int:
    """Version of the oldest policy token; staleness is measured from it."""
    versions = self.version_t[self.source_t == Source.POLICY]
    return int(versions.min()) if versions.size else -1

  @property
  def newest_version(self) -> int:
    """Version of the newest policy token."""
    return int(self.version_t[self.source_t == Source.POLICY].max(initial=-1))

  @property
  def num_sampled(self) -> int:
    """Policy tokens, a sampled stop token included."""
    return int((self.source_t == Source.POLICY).sum())

  @property
  def kept_overflow_t(self) -> np.ndarray:
    """Which tokens had a kept set too large to be recorded, bool [T]."""
    if self.kept_ids_t is None:
      return np.zeros(len(self.tokens), bool)
    return self.kept_ids_t[:, 0] == KEPT_OVERFLOW


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastSample:
  """What an earlier policy sampled after a prompt; arrays [T] as those of a Trajectory."""

  tokens: np.ndarray  # int32
  behaviour_log_probs_t: np.ndarray  # float32
  raw_log_probs_t: np.ndarray  # float32
  version_t: np.ndarray  # int32
  reward: float
  kept_ids_t: np.ndarray | None = None  # int32 [T, K]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
  """What a run knows of a prompt when a group of it is leased (data/prompt_history.py)."""

  samples: tuple[PastSample, ...] = ()  # of its last visit
  success_rate: float = 0.5
  success_weights: np.ndarray | None = None  # float64, of data/success_model.py


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """The samples drawn for one prompt in one visit.

  Ragged: the number of trajectories differs between groups. `greedy` was drawn beside them at
  temperature 0 where the objective compares with it; it is scored and never trained on.

  Where several roles take part, `others` are the groups that came of this one, each with its `role` and prompt: they
  were leased and delivered with it, and share its group id.
  """

  group_id: int
  prompt: Prompt
  prompt_tokens: np.ndarray  # int32 [P]
  trajectories: tuple[Trajectory, ...]
  greedy: Trajectory | None = None
  role: str = ''
  others: tuple['Group', ...] = ()

  @property
  def of_all_roles(self) -> tuple['Group', ...]:
    """This group and those that came of it."""
    return (self, *self.others)


class PackedBatch(NamedTuple):
  """Rows of packed token tries and the list of (source, target, trajectory) triples that losses go
  through.

  Rows (shape [R, T]): `tokens`, `positions` (depth from the root), `subtree_end` (index just past
  the last token that may see token j). Token i attends to token j iff j <= i < subtree_end[j];
  padding sees itself only. Triples (shape [R, N], one per trained or scored token of the row;
  padded at the end with mask_t False and trajectory_t -1): the hidden state at `source_index_t`
  predicts `target_t`. `adv_t`, `reward_t`, `behaviour_log_probs_t`, `proximal_log_probs_t`,
  `anchor_log_probs_t` are f32; where a log-prob is not used it is 0. `version_t` is the weights
  version that sampled the target. All triples of a trajectory lie in one row, in order.

  The hidden state at `next_index_t` is that of the state after the target: where the trajectory's
  next trained token is predicted, or after its last token where it was cut off; -1 where it ended.
  `value_t` and `next_value_t` are a critic's values at the two places, at the start of the batch.
  `teacher_log_probs_t` are those of config.learner.teacher.
  `kept_ids_t` holds the kept set of each target (see Trajectory); its log-probs are within that set.
  `place_weight` counts each token of the batch once where several rows hold it; read for mixtures of experts.
  `experts` are those that the tokens of the rows went through in the rollout (see Trajectory).
  """

  tokens: Any  # int32 [R, T]
  positions: Any  # int32 [R, T]
  subtree_end: Any  # int32 [R, T]
  source_index_t: Any  # int32 [R, N]
  target_t: Any  # int32 [R, N]
  mask_t: Any  # bool [R, N]
  trajectory_t: Any  # int32 [R, N], index of the trajectory in the batch
  group_t: Any  # int32 [R, N], index of the group in the batch
  turn_t: Any  # int32 [R, N], turn of the trajectory, from 0
  adv_t: Any  # float32 [R, N]
  reward_t: Any  # float32 [R, N], the trajectory's reward after shaping
  behaviour_log_probs_t: Any  # float32 [R, N]
  proximal_log_probs_t: Any  # float32 [R, N]
  anchor_log_probs_t: Any  # float32 [R, N]
  version_t: Any  # int32 [R, N]
  proximal_vocabulary: Any = {}  # what boxes know of the proximal distributions: [R, N, ...] by slot
  next_index_t: Any = None  # int32 [R, N]
  value_t: Any = None  # float32 [R, N], None without a critic
  next_value_t: Any = None  # float32 [R, N], 0 where the trajectory ended; None without a critic
  kept_ids_t: Any = None  # int32 [R, N, K], all -1: the whole vocabulary; None without kept sets
  place_weight: Any = None  # float32 [R, T], 0 at padding; None where nobody asked for it
  teacher_log_probs_t: Any = None  # float32 [R, N], None where no box reads it
  experts: Any = None  # int16 [R, T, L, k], -1 where the router is free; None where all of it is
