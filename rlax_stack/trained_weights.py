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
  directory: str | pathlib.Path, load_model_params: Callable[[], Any], step: int | None = None
) -> Any:
  """The whole weights, float32.

  Args:
    directory: of checkpoints.
    load_model_params: gives the parameters that the run began from; called only where an adapter was trained.
    step: the newest when None.

  Raises:
    CheckpointError: no checkpoint that can be read, or an adapter of another model.
  """
  step = newest_step(directory) if step is None else step
  found = trained_adapter(directory, step)
  if found is None:
    return load_checkpoint_params(directory, step)
  settings, adapter, saved = found
  base, source = freeze(load_model_params(), settings.base), f'step {step} in {directory}'
  check_identity(saved, identity_of(settings, base), source)
  return merge(adapter, base, settings)


def trained_adapter(
  directory: str | pathlib.Path, step: int
) -> tuple[AdapterSettings, Any, dict[str, Any]] | None:
  """The adapter of a checkpoint: its settings, its tree (numpy) and its identity; None where there is none."""
  saved = load_checkpoint_extras(directory, step).get('adapter')
  if saved is None:
    return None
  settings = saved_settings(saved, f'step {step} in {directory}')
  return settings, load_checkpoint_params(directory, step), saved
