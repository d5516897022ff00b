"""Sampled rollouts as JSON lines, for people: what was asked, what came, what it was worth.

Not a store to train from (that is token space). Invariant: text of a model is only ever written as
ASCII JSON, and a disk that fails costs records, never the run.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from rlax_stack.observe.json_files import read_lines, write_lines_atomic
from rlax_stack.types import Group, Source, Trajectory


class RolloutsWriter:
  """Writes `samples/<split>-<step>.jsonl`, a whole file per call.

  Args:
    samples_dir: an existing folder.
    max_per_step: rollouts per file at most; taken across groups first, so that many prompts are
      seen.
    max_text_chars: a longer prompt or completion is cut, and says so by `truncated_chars`.
    restored_step: files of later steps, from an earlier life of the run, are removed. -1 removes
      all.
  """

  def __init__(
    self,
    samples_dir: Path,
    *,
    max_per_step: int = 16,
    max_text_chars: int = 20_000,
    restored_step: int = -1,
  ):
    self._samples_dir = samples_dir
    self._max_per_step = max_per_step
    self._max_text_chars = max_text_chars
    self.failed = 0
    self._guard(lambda: self._remove_after(restored_step))

  def write(self, step: int, groups: Sequence[Group], *, split: str = 'train') -> int:
    """Writes some rollouts of `groups`, replacing an earlier file of the same step and split.

    Returns: the number of rollouts written; 0 when the disk failed (counted in `failed`, logged
    once).
    """
    chosen = [pair for pair, _ in zip(_across(groups), range(self._max_per_step), strict=False)]
    records = [
      rollout_record(step, group, trajectory, max_text_chars=self._max_text_chars)
      for group, trajectory in chosen
    ]
    path = self._samples_dir / f'{split}-{step:06d}.jsonl'
    return len(records) if self._guard(lambda: write_lines_atomic(path, records)) else 0

  def _remove_after(self, step: int) -> None:
    for path in sorted(self._samples_dir.glob('*-*.jsonl')):
      if (number := _step_of(path)) is not None and number > step:
        path.unlink()

  def _guard(self, function: Any) -> bool:
    try:
      function()
    except OSError as error:
      self.failed += 1
      if self.failed == 1:
        logging.warning('Sampled rollouts could not be written (%s); training goes on.', error)
      return False
    return True


def rollout_record(
  step: int, group: Group, trajectory: Trajectory, *, max_text_chars: int = 20_000
) -> dict[str, Any]:
  """One rollout as plain JSON values; versions are those of its policy tokens."""
  versions = trajectory.version_t[trajectory.source_t == Source.POLICY]
  prompt = '\n'.join(f'{message.role}: {message.content}' for message in group.prompt.messages)
  cut = max(0, len(prompt) - max_text_chars) + max(0, len(trajectory.text) - max_text_chars)
  reward = trajectory.reward
  role = {'role': trajectory.role} if trajectory.role else {}
  return role | {
    'step': step,
    'trajectory_id': trajectory.trajectory_id,
    'prompt_id': trajectory.prompt_id,
    'prompt': prompt[:max_text_chars],
    'completion': trajectory.text[:max_text_chars],
    'truncated_chars': cut,
    'answer': group.prompt.answer,
    'reward': _plain(reward.value) if reward else None,
    'reward_parts': {name: _plain(part) for name, part in reward.parts.items()} if reward else {},
    'reward_failure': reward.failure if reward else None,
    'finish_reason': trajectory.finish_reason.value,
    'num_tokens': trajectory.num_sampled,
    'oldest_version': int(versions.min()) if versions.size else None,
    'newest_version': int(versions.max()) if versions.size else None,
  }


def read_rollouts(samples_dir: Path, *, split: str, last: bool) -> list[dict[str, Any]]:
  """The records of the first or the last step that wrote rollouts of `split`, or none."""
  paths = [
    (number, path)
    for path in samples_dir.glob(f'{split}-*.jsonl')
    if (number := _step_of(path)) is not None
  ]
  if not paths:
    return []
  return list(read_lines((max if last else min)(paths)[1]))


def _across(groups: Sequence[Group]) -> Iterator[tuple[Group, Trajectory]]:
  """The first sample of every group, then the second of every group, and so on."""
  for index in range(max((len(group.trajectories) for group in groups), default=0)):
    for group in groups:
      if index < len(group.trajectories):
        yield group, group.trajectories[index]


def _step_of(path: Path) -> int | None:
  text = path.stem.rpartition('-')[2]
  return int(text) if text.isdecimal() else None


def _plain(value: Any) -> float | None:
  """JSON has no NaN: a number that is not finite becomes null."""
  number = None if value is None else float(value)
  return number if number is not None and abs(number) < float('inf') else None
