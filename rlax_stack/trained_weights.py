"""The weights of a run's checkpoint: whole ones as they were saved, an adapter merged into the model it belongs to."""

import pathlib
from collections.abc import Callable
from typing import Any

from rlax_stack.learner.adapter_identity import check_identity, identity_of, saved_settings
from rlax_stack.learner.checkpoint import (
  load_checkpoint_extras,
  load_checkpoint_params,
  newest_step,
)
from rlax_stack.models.adapter import AdapterSettings, merge
from rlax_stack.models.frozen import freeze


def trained_weights(
  directory: str | pathlib.Path,
  load_model_params: Callable[[], Any],
  step: int | None = None,
  policy: str = '',
) -> Any:
  """The whole weights, float32.

  Args:
    directory: of checkpoints.
    load_model_params: gives the parameters that the run began from; called only where an adapter was trained.
    step: the newest when None.
    policy: of a run of several, '' for the first.

  Raises:
    CheckpointError: no checkpoint that can be read, or an adapter of another model.
  """
  step = newest_step(directory) if step is None else step
  found = trained_adapter(directory, step, policy)
  if found is None:
    return load_checkpoint_params(directory, step, policy)
  settings, adapter, saved = found
  base, source = freeze(load_model_params(), settings.base), f'step {step} in {directory}'
  check_identity(saved, identity_of(settings, base), source)
  return merge(adapter, base, settings)


def trained_adapter(
  directory: str | pathlib.Path, step: int, policy: str = ''
) -> tuple[AdapterSettings, Any, dict[str, Any]] | None:
  """The adapter of a checkpoint: its settings, its tree (numpy) and its identity; None where there is none."""
  extras = load_checkpoint_extras(directory, step)
  if policy:  # what a JointLearner keeps of it
    extras = (extras.get('objective') or {}).get('policies', {}).get(policy, {})
  saved = extras.get('adapter')
  if saved is None:
    return None
  settings = saved_settings(saved, f'step {step} in {directory}')
  return settings, load_checkpoint_params(directory, step, policy), saved
