"""A weighted sum of named verifiers, built from config data.

A verifier answers with a number, or with the rewards of single steps: pairs of where in the text a step ends (in
characters, ascending) and its reward. Those sum up to its score, and the weighted steps of all verifiers together are
the reward's `step_values`. Invariant: a sample for which any verifier failed (an exception, a deadline, a dead process,
NaN or infinity) has no value; it carries the reason and is counted, and is never scored 0.
"""

import collections
import dataclasses
import difflib
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlax_stack.errors import ConfigError, RewardError
from rlax_stack.rewards.pool import PoolTask, ProcessPool
from rlax_stack.rewards.verifiers import VERIFIERS, Verifier
from rlax_stack.types import Prompt, Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainPart:
  """One verifier of a chain; `label` names its score in `Reward.parts`."""

  label: str
  weight: float
  verifier: Verifier


class RewardChain:
  """Scores texts. Close it (or use it as a context manager) to end its processes.

  `failures` counts failed samples by the label of the verifier that failed first; `num_scored` counts all samples.
  """

  def __init__(
    self, parts: Sequence[ChainPart], *, pool: ProcessPool | None = None, deadline_s: float = 5.0
  ):
    """`pool` is needed if any verifier runs in it; `deadline_s` is for each such task."""
    self.parts = tuple(parts)
    pooled = [part.label for part in self.parts if part.verifier.task is not None]
    if pooled and pool is None:
      raise RewardError(
        f'the verifiers {pooled} run in a pool, but the chain was given none. Use build_chain.'
      )
    self.failures: collections.Counter[str] = collections.Counter()
    self.num_scored = 0
    self._pool = pool
    self._deadline_s = deadline_s
    self._count_lock = threading.Lock()

  def __enter__(self) -> 'RewardChain':
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def start(self) -> None:
    """Starts the processes, if any are needed, without waiting: they import while other things happen."""
    if self._pool is not None:
      self._pool.start()

  def close(self) -> None:
    """Ends the processes."""
    if self._pool is not None:
      self._pool.close()

  def score(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[Reward]:
    """One reward per (text, prompt), in order.

    Raises ValueError on unequal lengths and RewardError if pool processes do not start at all.
    """
    if len(texts) != len(prompts):
      raise ValueError(
        f'score needs one prompt per text, got {len(texts)} texts and {len(prompts)} prompts'
      )
    verdicts: list[dict[str, Any]] = [{} for _ in texts]
    failures: list[dict[str, str]] = [{} for _ in texts]
    queued: list[tuple[int, str, PoolTask]] = []
    for part in self.parts:
      for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        try:
          if part.verifier.task is not None:
            queued.append((index, part.label, part.verifier.task(text, prompt)))
          elif part.verifier.score is not None:
            _record(part.verifier.score(text, prompt), index, part.label, verdicts, failures)
        except (
          Exception
        ) as error:  # a verifier may raise anything; the sample is dropped and counted
          failures[index][part.label] = f'{type(error).__name__}: {error}'
    self._run_queued(queued, verdicts, failures)
    return self._sum(verdicts, failures)

  def _run_queued(self, queued, verdicts, failures) -> None:
    if not queued or self._pool is None:
      return
    results = self._pool.run([task for _, _, task in queued], deadline_s=self._deadline_s)
    for (index, label, _), result in zip(queued, results, strict=True):
      if result.failure is not None:
        failures[index][label] = result.failure
      else:
        _record(result.value, index, label, verdicts, failures)

  def _sum(self, verdicts, failures) -> list[Reward]:
    rewards = []
    for verdict, failed in zip(verdicts, failures, strict=True):
      parts = {label: _score(value) for label, value in verdict.items()}
      if failed:
        reason = '; '.join(f'{label}: {why}' for label, why in failed.items())
        rewards.append(Reward(value=None, parts=parts, failure=reason))
        continue
      value = math.fsum(part.weight * parts[part.label] for part in self.parts)
      steps = self._steps(verdict)
      rewards.append(
        Reward(value=value, parts=parts, step_values=tuple(steps.values()), step_ends=tuple(steps))
      )
    with self._count_lock:
      self.num_scored += len(rewards)
      self.failures.update(next(iter(failed)) for failed in failures if failed)
    return rewards

  def _steps(self, verdict: Mapping[str, Any]) -> dict[int, float]:
    """End to weighted reward of every step that some verifier judged, ascending."""
    steps: dict[int, float] = {}
    for part in self.parts:
      if isinstance(verdict[part.label], list):
        for end, value in verdict[part.label]:
          steps[end] = steps.get(end, 0.0) + part.weight * value
    return dict(sorted(steps.items()))


def build_chain(
  specs: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]],
  *,
  deadline_s: float = 5.0,
  num_processes: int = 2,
  memory_bytes: int = 2 << 30,
  functions: Mapping[str, Callable[[str, Prompt], Any]] | None = None,
) -> RewardChain:
  """A chain from config data: [{'name': 'number'}, {'name': 'format', 'pattern': 'x', 'weight': 0.1}].

  Args:
    specs: a list, or a mapping from label to options, in which the name defaults to the label. Each has a 'name' (a
      key of `VERIFIERS` or of `functions`), a 'weight' (default 1.0; 0 only observes), a 'label' (default the name;
      must be unique) and the verifier's own options.
    deadline_s: seconds per pooled task.
    num_processes: processes of the pool; it exists only if a verifier needs it and starts at its first task.
    memory_bytes: address space of each process.
    functions: verifiers of your own by name, (text, prompt) -> number or steps, run in this process.

  Raises ConfigError on unknown names or options (with the nearest), double labels and weights that are not finite.
  """
  functions = functions or {}
  if isinstance(specs, Mapping):
    specs = [{'name': label, 'label': label, **options} for label, options in specs.items()]
  parts = [_build_part(spec, functions) for spec in specs]
  labels = [part.label for part in parts]
  if not parts or len(set(labels)) < len(labels):
    raise ConfigError(
      f'a reward needs verifiers with different labels, got {labels}. Give each its own label.'
    )
  if not deadline_s > 0:
    raise ConfigError(
      f'deadline_s must be above 0, got {deadline_s}. Set config.reward.deadline_s.'
    )
  preload = sorted({name for part in parts for name in part.verifier.preload})
  pool = None
  if any(part.verifier.task is not None for part in parts):
    pool = ProcessPool(num_processes=num_processes, memory_bytes=memory_bytes, preload=preload)
  return RewardChain(parts, pool=pool, deadline_s=deadline_s)


def _build_part(spec: Mapping[str, Any], functions: Mapping[str, Callable]) -> ChainPart:
  options = dict(spec)
  name = options.pop('name', None)
  weight = options.pop('weight', 1.0)
  label = options.pop('label', name)
  known = [*VERIFIERS, *functions]
  if name not in known:
    near = difflib.get_close_matches(str(name), known, n=3) or known
    raise ConfigError(f'there is no verifier {name!r}. The nearest names are: {", ".join(near)}.')
  if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
    raise ConfigError(f'the weight of verifier {name!r} must be a finite number, got {weight!r}')
  if name in functions:
    return ChainPart(
      label=label, weight=float(weight), verifier=Verifier(score=functions[name], **options)
    )
  parameters = inspect.signature(VERIFIERS[name]).parameters
  for option in options:
    if option not in parameters:
      near = difflib.get_close_matches(option, parameters, n=3) or list(parameters)
      raise ConfigError(
        f'verifier {name!r} has no option {option!r}. The nearest are: {", ".join(near)}.'
      )
  required = [key for key, value in parameters.items() if value.default is value.empty]
  missing = [key for key in required if key not in options]
  if missing:
    raise ConfigError(f'verifier {name!r} needs the option {missing[0]!r}, got {sorted(options)}')
  return ChainPart(label=label, weight=float(weight), verifier=VERIFIERS[name](**options))


def _record(value: Any, index: int, label: str, verdicts: list[dict], failures: list[dict]) -> None:
  if _is_number(value) or _are_steps(value):
    verdicts[index][label] = value
  else:
    failures[index][label] = f'the verifier answered {value!r}, which is no finite number'


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and math.isfinite(value)


def _are_steps(value: Any) -> bool:
  """Whether it is a list of [end, reward] pairs with ascending ends above 0."""
  if not isinstance(value, list):
    return False
  if not all(isinstance(step, list | tuple) and len(step) == 2 for step in value):
    return False
  ends = [end for end, _ in value]
  ascending = all(isinstance(end, int) for end in ends) and sorted({0, *ends}) == [0, *ends]
  return ascending and all(_is_number(reward) for _, reward in value)


def _score(verdict: Any) -> float:
  """A verdict as one number."""
  if isinstance(verdict, list):
    return math.fsum(reward for _, reward in verdict)
  return float(verdict)
