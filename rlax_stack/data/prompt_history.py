"""What earlier visits of a prompt left behind: samples to go on from, its rate of success, a model of success.

The coordinator tells it of every batch that was trained, asks it when it leases a group, and saves it with its own
state; so what a strategy draws from the past follows from what was trained, whichever worker draws. Invariant: at most
`max_tokens` tokens are held; prompts that were visited longest ago go first.
"""

import base64
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlax_stack.data.success_model import (
  SuccessModel,
  new_success_model,
  prefix_features,
  update_success_model,
)
from rlax_stack.rng import numpy_rng
from rlax_stack.types import Group, Past, PastSample, Trajectory

_FADING = 0.5  # what older visits of a prompt weigh in its rate
_PARTS = (0.0, 0.25, 0.5, 0.75)  # of a sample that the model of success learns from
_ARRAYS = {
  'tokens': np.int32,
  'behaviour_log_probs_t': np.float32,
  'raw_log_probs_t': np.float32,
  'version_t': np.int32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistorySettings:
  """What of the past a strategy wants.

  samples: of its last visit that are held of each prompt. best: those of the highest reward, else any. success: whether
  a model of success is learnt; `max_tokens` is the most that a sample may have.
  """

  samples: int = 0
  best: bool = False
  success: bool = False
  max_tokens: int = 1


class PromptHistory:
  """Not thread-safe: the coordinator locks.

  Args:
    settings: what is held.
    seed: of the run; says which samples are held where `best` does not.
    max_tokens: of held samples, over all prompts.
  """

  def __init__(self, settings: HistorySettings, *, seed: int, max_tokens: int = 2**22):
    self._settings, self._seed, self._max_tokens = settings, seed, max_tokens
    self._samples: OrderedDict[str, tuple[PastSample, ...]] = OrderedDict()
    self._num_tokens = 0
    self._outcomes: dict[str, tuple[float, float]] = {}  # faded successes and samples of a prompt
    self._all = (0.5, 1.0)  # those of all prompts; half a success at the start
    self._model = new_success_model()

  @property
  def num_tokens(self) -> int:
    """Tokens held."""
    return self._num_tokens

  def of(self, prompt_id: str) -> Past:
    """What a group of the prompt may know."""
    return Past(
      samples=self._samples.get(prompt_id, ()),
      success_rate=self._rate(prompt_id),
      success_weights=self._model.mean if self._settings.success else None,
    )

  def keep(self, groups: Sequence[Group]) -> None:
    """Learns from a batch that was trained, in the order given."""
    if self._settings.success:
      self._learn(groups)
    if self._settings.samples:
      for group in groups:
        self._hold(group)

  def state(self) -> dict[str, Any]:
    """JSON value."""
    return {
      'samples': {name: [_to_json(s) for s in held] for name, held in self._samples.items()},
      'outcomes': {name: list(pair) for name, pair in self._outcomes.items()},
      'all': list(self._all),
      'model': [self._model.mean.tolist(), self._model.precision.tolist()],
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes over `state()`. KeyError, TypeError or ValueError where it is malformed."""
    samples = OrderedDict(
      (name, tuple(_from_json(s) for s in held)) for name, held in state['samples'].items()
    )
    mean, precision = (np.asarray(part, np.float64) for part in state['model'])
    self._samples, self._model = samples, SuccessModel(mean, precision)
    self._num_tokens = sum(len(s.tokens) for held in samples.values() for s in held)
    self._outcomes = {name: (float(s), float(n)) for name, (s, n) in state['outcomes'].items()}
    self._all = (float(state['all'][0]), float(state['all'][1]))

  def _rate(self, prompt_id: str) -> float:
    """Of success, in (0, 1): a prompt that was seen little is taken for an average one."""
    successes, count = self._outcomes.get(prompt_id, (0.0, 0.0))
    rate = (successes + 2 * self._all[0] / self._all[1]) / (count + 2)
    return float(np.clip(rate, 0.01, 0.99))

  def _learn(self, groups: Sequence[Group]) -> None:
    """The model learns from the rates as they were when the groups were drawn; then the rates move."""
    features, success = [], []
    for group in groups:
      rate = self._rate(group.prompt.prompt_id)
      for trajectory in group.trajectories:
        log_probs = trajectory.raw_log_probs_t[len(group.prompt_tokens) :]
        depths = np.unique([int(part * len(log_probs)) for part in _PARTS])
        found = prefix_features(log_probs, depths, rate=rate, max_tokens=self._settings.max_tokens)
        features.append(found)
        success.append(np.full(len(found), _success(trajectory)))
    if features:
      self._model = update_success_model(
        self._model, np.concatenate(features), np.concatenate(success)
      )
    for group in groups:
      values = [_success(trajectory) for trajectory in group.trajectories]
      before = self._outcomes.get(group.prompt.prompt_id, (0.0, 0.0))
      self._outcomes[group.prompt.prompt_id] = _faded(before, values, _FADING)
      self._all = _faded(self._all, values, 0.99)

  def _hold(self, group: Group) -> None:
    """Holds some samples of a group in place of those of the visit before."""
    prompt_id, start = group.prompt.prompt_id, len(group.prompt_tokens)
    order = numpy_rng(self._seed, 'history', group.group_id).permutation(len(group.trajectories))
    found = [group.trajectories[i] for i in order]
    if self._settings.best:
      found.sort(key=lambda trajectory: -_value(trajectory))
    known = [t for t in found if (t.version_t[start:] >= 0).all() and not t.context_starts]
    held = tuple(_past(t, start) for t in known[: self._settings.samples])
    gone = self._samples.pop(prompt_id, ())
    self._samples[prompt_id] = held
    self._num_tokens += _tokens(held) - _tokens(gone)
    while self._num_tokens > self._max_tokens and len(self._samples) > 1:
      self._num_tokens -= _tokens(self._samples.popitem(last=False)[1])


def _value(trajectory: Trajectory) -> float:
  reward = trajectory.reward
  return 0.0 if reward is None or reward.value is None else reward.value


def _success(trajectory: Trajectory) -> float:
  return float(np.clip(_value(trajectory), 0.0, 1.0))


def _faded(
  pair: tuple[float, float], values: Sequence[float], memory: float
) -> tuple[float, float]:
  return memory * pair[0] + sum(values), memory * pair[1] + len(values)


def _tokens(held: Sequence[PastSample]) -> int:
  return sum(len(sample.tokens) for sample in held)


def _past(trajectory: Trajectory, start: int) -> PastSample:
  kept = trajectory.kept_ids_t
  return PastSample(
    **{name: getattr(trajectory, name)[start:] for name in _ARRAYS},
    kept_ids_t=None if kept is None else kept[start:],
    reward=_value(trajectory),
  )


def _to_json(sample: PastSample) -> dict[str, Any]:
  value: dict[str, Any] = {name: _encode(getattr(sample, name)) for name in _ARRAYS}
  if sample.kept_ids_t is not None:
    value['kept_ids_t'] = [_encode(sample.kept_ids_t), sample.kept_ids_t.shape[1]]
  return value | {'reward': sample.reward}


def _from_json(value: Mapping[str, Any]) -> PastSample:
  kept = None
  if 'kept_ids_t' in value:
    text, width = value['kept_ids_t']
    kept = _decode(text, np.int32).reshape(-1, width)
  return PastSample(
    **{name: _decode(value[name], dtype) for name, dtype in _ARRAYS.items()},
    kept_ids_t=kept,
    reward=float(value['reward']),
  )


def _encode(array: np.ndarray) -> str:
  """Little-endian bytes as base64: exact, and a quarter of the room that digits take."""
  return base64.b64encode(array.astype(array.dtype.newbyteorder('<')).tobytes()).decode('ascii')


def _decode(text: str, dtype: Any) -> np.ndarray:
  stored = np.dtype(dtype).newbyteorder('<')
  return np.frombuffer(base64.b64decode(text, validate=True), stored).astype(dtype)
