"""Checkpoints of the learner and of everything that must agree with it, in one atomic commit
(orbax).

Not for publishing weights to workers. Invariants: a step directory either holds a whole commit or
is ignored; what is restored is bit for bit what was saved, or it is refused (every array carries a
checksum) and the step before it is used.
"""

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax import lax

from rlax_stack.errors import CheckpointError
from rlax_stack.learner import multihost
from rlax_stack.learner.directions import averaged_weights, schedule_free_state
from rlax_stack.learner.state import LearnerState

_MEETING_S = 300.0  # for the other processes, where there are any
_FORMAT = 1  # unchanged by critics: a checkpoint without one is what it always was


# Of a run of several policies: the state of each by its name, '' for the first.
States = LearnerState | Mapping[str, LearnerState]


class Restored(NamedTuple):
  """What `Checkpointer.restore_latest` found."""

  step: int
  state: Any  # as the target given: a LearnerState, or several by policy
  extras: dict[str, Any]


class Checkpointer:
  """Saves and restores steps under one directory.

  Args:
    directory: created where missing; unfinished saves in it are removed.
    keep: newest steps kept.
    asynchronous: True copies the state and writes in the background; an error surfaces at the next
      `save`, `wait` or `close`.
  """

  def __init__(self, directory: str | pathlib.Path, *, keep: int = 2, asynchronous: bool = True):
    self._directory = pathlib.Path(directory).absolute()
    self._keep, self._asynchronous = keep, asynchronous
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      self._manager = self._open()
    except OSError as error:
      raise CheckpointError(
        f'cannot use {self._directory} for checkpoints: {error}. Choose another workdir.'
      ) from error

  def _open(self) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
      max_to_keep=self._keep,
      enable_async_checkpointing=self._asynchronous,
      cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager(self._directory, options=options)

  def warm_up(self, state: States) -> None:
    """Compiles what `save` runs on the devices, so that no later step waits for it."""
    for one in _by_policy(state).values():
      jax.block_until_ready((_copy(one), _word_sums(jax.tree.leaves(one))))
      if (average := schedule_free_state(one.opt_state)) is not None:
        published = _averaged(average, one.params)
        jax.block_until_ready(_word_sums(jax.tree.leaves(published)))

  def save(self, step: int, state: States, extras: Mapping[str, Any]) -> None:
    """Commits `state` and `extras` as `step`, together or not at all.

    Waits for the save before it, then blocks for one copy of the state at most; the state may be
    donated as soon as this returns. Saving a step that exists already does nothing.

    Args:
      step: larger than every step saved before.
      state: arrays, sharded in any way; those of several policies by name are one commit too.
      extras: JSON values: version, prompt iterator, ledger, random state, metrics position.

    Raises:
      CheckpointError: it cannot be written, or the save before it could not.
    """
    self.wait()
    if step in self._manager.all_steps():
      return
    document: dict[str, Any] = {'format': _FORMAT, 'extras': dict(extras)}
    items: dict[str, Any] = {'document': ocp.args.JsonSave(document)}
    for policy, one in _by_policy(state).items():
      copy, prefix = _copy(one), _prefix(policy)
      document[f'{prefix}checksums'] = _checksums(copy)
      items[f'{prefix}params'] = ocp.args.StandardSave(copy.params)
      items[f'{prefix}rest'] = ocp.args.StandardSave(_rest(copy))
      if copy.critic:
        items[f'{prefix}critic'] = ocp.args.StandardSave(copy.critic)
      average = schedule_free_state(copy.opt_state)
      if average is not None:  # what others read in the place of the parameters
        published = _averaged(average, copy.params)
        items[f'{prefix}published'] = ocp.args.StandardSave(published)
        document[f'{prefix}published_checksums'] = _checksums(published)
    try:
      self._manager.save(step, args=ocp.args.Composite(**items), force=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
      raise CheckpointError(f'step {step} was not saved in {self._directory}: {error}') from error

  def wait(self) -> None:
    """Waits until what was saved is committed; CheckpointError where it was not."""
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except Exception as error:  # whatever the writing thread died of
      raise CheckpointError(
        f'the last checkpoint was not written in {self._directory}: {error}'
      ) from error

  def steps(self) -> list[int]:
    """Committed steps, oldest first."""
    return sorted(self._manager.all_steps())

  def restore_latest(self, target: States) -> Restored | None:
    """The newest step that is whole, or None where nothing was ever committed.

    A step that cannot be read, or whose checksums do not match, is logged as an error, moved to
    `<directory>-damaged`, and the one before it is tried.

    Args:
      target: shapes, dtypes and shardings to restore into (`Learner.abstract_state()`), by policy where there are
        several.

    Raises:
      CheckpointError: there are steps and none can be restored.
    """
    self.wait()
    steps, reasons, damaged = self.steps(), [], []
    for step in reversed(steps):
      try:
        restored = self._restore(step, target)
      except Exception as error:  # tensorstore, json and orbax raise whatever the damage makes them
        logging.error(
          'checkpoint step %d cannot be restored, trying the one before: %s', step, error
        )
        reasons.append(f'step {step}: {str(error).splitlines()[0] if str(error) else error!r}')
        damaged.append(step)
        continue
      self._set_aside(damaged)
      return restored
    if steps:
      raise CheckpointError(
        f'no checkpoint in {self._directory} can be restored. {"; ".join(reasons)}. Restore the '
        'directory from a copy, or start in a new workdir.'
      )
    return None

  def close(self) -> None:
    """Waits for the last save and frees the threads."""
    self.wait()
    self._manager.close()

  def _restore(self, step: int, target: States) -> Restored:
    folder, targets = self._directory / str(step), _by_policy(target)
    saved = {p.name.rpartition('.')[0] for p in folder.iterdir() if p.name.endswith('params')}
    if saved != set(targets):
      raise CheckpointError(
        f'it holds the policies {sorted(saved)} and this run has {sorted(targets)}: see config.policies'
      )
    items: dict[str, Any] = {'document': ocp.args.JsonRestore()}
    for policy, one in targets.items():
      prefix = _prefix(policy)
      items[f'{prefix}params'] = ocp.args.StandardRestore(one.params)
      items[f'{prefix}rest'] = ocp.args.StandardRestore(_rest(one))
      if (folder / f'{prefix}critic').exists() != bool(one.critic):
        has, wants = ('no critic', 'one') if one.critic else ('a critic', 'none')
        raise CheckpointError(f'it has {has} and this run has {wants}: see config.objective.critic')
      if one.critic:
        items[f'{prefix}critic'] = ocp.args.StandardRestore(one.critic)
    found = self._manager.restore(step, args=ocp.args.Composite(**items))
    document, states = found['document'], {}
    if document['format'] != _FORMAT:
      raise CheckpointError(f'format {document["format"]} is not {_FORMAT}')
    for policy, one in targets.items():
      prefix = _prefix(policy)
      critic = found[f'{prefix}critic'] if one.critic else {}
      state = LearnerState(params=found[f'{prefix}params'], critic=critic, **found[f'{prefix}rest'])
      if _checksums(state) != document[f'{prefix}checksums']:
        raise CheckpointError('checksums do not match: the files were damaged')
      states[policy] = state
    single = states[''] if isinstance(target, LearnerState) else states
    return Restored(step, single, document['extras'])

  def _set_aside(self, steps: list[int]) -> None:
    """Moves damaged steps out of the way, so that their numbers can be saved again."""
    if not steps:
      return
    self._manager.close()
    aside = self._directory.parent / f'{self._directory.name}-damaged'
    if jax.process_index() == 0:
      aside.mkdir(exist_ok=True)
      for step in steps:
        if (aside / str(step)).exists():
          shutil.rmtree(aside / str(step))
        (self._directory / str(step)).rename(aside / str(step))
    multihost.meet('damaged checkpoints', deadline_s=_MEETING_S)
    self._manager = self._open()


def load_checkpoint_params(
  directory: str | pathlib.Path, step: int | None = None, policy: str = ''
) -> Any:
  """The parameters of a committed step as numpy arrays, without optimizer state or a model at hand.

  Of a schedule-free run they are the average that it publishes.

  Args:
    directory: the directory of a `Checkpointer`.
    step: the newest when None.
    policy: of a run of several, '' for the first.

  Raises:
    CheckpointError: no such directory, step or policy, or one that cannot be read.
  """
  commit, prefix = _commit(pathlib.Path(directory).absolute(), step), _prefix(policy)
  if not (commit / f'{prefix}params').is_dir():
    raise CheckpointError(f'{commit} has no policy {policy!r}. See config.policies of its run.')
  published = (commit / f'{prefix}published').is_dir()
  try:
    params = _read_numpy(commit / (prefix + ('published' if published else 'params')))
    document = json.loads((commit / 'document' / 'metadata').read_text())
    checksums = document[prefix + ('published_checksums' if published else 'checksums')]
  except Exception as error:  # tensorstore, json and orbax raise whatever the damage makes them
    raise CheckpointError(f'{commit} cannot be read: {error}') from error
  # The parameters are the first field of the state, so their checksums come first.
  words = (np.sum(_words(leaf), dtype=np.uint32) for leaf in jax.tree.leaves(params))
  if any(int(a) != b for a, b in zip(words, checksums, strict=False)):
    raise CheckpointError(f'{commit} cannot be read: checksums do not match. Try an older step.')
  return params


def load_checkpoint_extras(directory: str | pathlib.Path, step: int) -> dict[str, Any]:
  """What a committed step says beside its arrays; CheckpointError where it is not there or cannot be read."""
  commit = _commit(pathlib.Path(directory).absolute(), step)
  try:
    return json.loads((commit / 'document' / 'metadata').read_text())['extras']
  except (OSError, ValueError, KeyError) as error:
    raise CheckpointError(f'{commit} cannot be read: {error}') from error


def newest_step(directory: str | pathlib.Path) -> int:
  """The newest committed step in the directory of a `Checkpointer`; CheckpointError where there is none."""
  return int(_commit(pathlib.Path(directory).absolute(), None).name)


def load_checkpoint_critic(source: str | pathlib.Path) -> Any:
  """The parameters of a critic that an earlier run saved, as numpy arrays.

  Args:
    source: a run's folder, its directory of checkpoints (the newest step is taken), or one step.

  Raises:
    CheckpointError: nothing there, no critic in it, or one that cannot be read.
  """
  path = pathlib.Path(source).expanduser().absolute()
  if (path / 'document').is_dir():
    commit = path
  else:
    commit = _commit(path / 'checkpoints' if (path / 'checkpoints').is_dir() else path, None)
  if not (commit / 'critic').is_dir():
    raise CheckpointError(f'{commit} has no critic: the run that saved it was without one.')
  try:
    state = _read_numpy(commit / 'critic')
    checksums = json.loads((commit / 'document' / 'metadata').read_text())['checksums']
  except Exception as error:  # tensorstore, json and orbax raise whatever the damage makes them
    raise CheckpointError(f'{commit} cannot be read: {error}') from error
  # The critic is the last field of the state, so its checksums come last.
  words = [int(np.sum(_words(leaf), dtype=np.uint32)) for leaf in jax.tree.leaves(state)]
  if words != checksums[-len(words) :]:
    raise CheckpointError(f'{commit} cannot be read: checksums do not match. Try an older step.')
  return state['params']


def _commit(path: pathlib.Path, step: int | None) -> pathlib.Path:
  """The folder of a committed step, the newest when None."""
  if not path.is_dir():
    raise CheckpointError(f'no checkpoints in {path}: there is no such directory.')
  with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
    steps = sorted(manager.all_steps())
  if not steps or (step is not None and step not in steps):
    raise CheckpointError(f'no checkpoint of step {step or "any"} in {path}, there are {steps}.')
  return path / str(steps[-1] if step is None else step)


def _words(leaf: Any) -> np.ndarray:
  return np.atleast_1d(np.asarray(leaf)).view(np.uint32)


def _read_numpy(item: pathlib.Path) -> Any:
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    tree = checkpointer.metadata(item).item_metadata.tree
    as_numpy = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree, is_leaf=_is_metadata
    )
    return checkpointer.restore(item, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def _is_metadata(value: Any) -> bool:
  return hasattr(value, 'shape')


def _by_policy(state: States) -> dict[str, LearnerState]:
  return {'': state} if isinstance(state, LearnerState) else dict(state)


def _prefix(policy: str) -> str:
  """Of a policy's items: those of the first have their bare names."""
  return f'{policy}.' if policy else ''


def _rest(state: LearnerState) -> dict[str, Any]:
  own_item = ('params', 'critic')
  rest = {name: value for name, value in state._asdict().items() if name not in own_item}
  # Left out where there is none, so that steps saved before there was such a field restore.
  return rest if rest['average'] else {k: v for k, v in rest.items() if k != 'average'}


@jax.jit
def _copy(state: LearnerState) -> LearnerState:
  """A copy on the devices: the next step may take the state's buffers while this one is written."""
  return jax.tree.map(jnp.copy, state)


_averaged = jax.jit(averaged_weights)


def _checksums(state: Any) -> list[int]:
  """One uint32 for each array, in tree order: the wrapped sum of its 32-bit words."""
  return [int(x) for x in jax.device_get(_word_sums(jax.tree.leaves(state)))]


@jax.jit
def _word_sums(leaves: list[jax.Array]) -> list[jax.Array]:
  def word_sum(leaf):
    wide = leaf if leaf.dtype.itemsize == 4 else leaf.astype(jnp.float32)
    return jnp.sum(lax.bitcast_convert_type(wide, jnp.uint32), dtype=jnp.uint32)

  return [word_sum(leaf) for leaf in leaves]
