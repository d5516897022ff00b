"""Which weights an adapter belongs to: saved with it, and compared before it is used.

An adapter is a change of certain weights, and rubbish beside any others. Invariant: the identity does not depend on how
the weights are sharded.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlax_stack.errors import CheckpointError
from rlax_stack.models.adapter import AdapterSettings


def identity_of(settings: AdapterSettings, base: Any) -> dict[str, Any]:
  """What the adapter is and a sum over the bits of the frozen weights, a JSON object.

  Args:
    settings: of the adapter.
    base: the frozen weights, from `frozen.freeze`.
  """
  total = 0
  for word in jax.device_get(_word_sums(jax.tree.leaves(base))):
    total = (31 * total + int(word)) % 2**32
  return {
    'kind': settings.kind,
    'rank': settings.rank,
    'alpha': settings.alpha,
    'targets': list(settings.targets),
    'base': settings.base,
    'base_sum': total,
  }


def saved_settings(saved: Mapping[str, Any], source: str) -> AdapterSettings:
  """The settings in a saved identity; CheckpointError where it is malformed."""
  try:
    fields = {name: saved[name] for name in ('kind', 'rank', 'alpha', 'base')}
    return AdapterSettings(targets=tuple(saved['targets']), **fields)
  except (KeyError, TypeError) as error:
    raise CheckpointError(
      f'{source} has no readable description of its adapter ({error!r}).'
    ) from error


def check_identity(saved: Any, here: Mapping[str, Any], source: str) -> None:
  """Raises CheckpointError, naming what differs, where an adapter of `source` belongs to other weights than `here`.

  Args:
    saved: what the checkpoint says; None where it says nothing.
    here: `identity_of` the adapter and weights at hand.
    source: where the checkpoint is, for messages.
  """
  found = {} if saved is None else dict(saved)
  differing = [name for name in here if found.get(name) != here[name]]
  if differing:
    name = differing[0]
    raise CheckpointError(
      f'{source} holds an adapter of other weights: {name} is {found.get(name)!r} there and {here[name]!r} here. Use '
      'the model and the config.learner.adapter that it was trained with.'
    )


@jax.jit
def _word_sums(leaves: list[jax.Array]) -> list[jax.Array]:
  def word_sum(leaf):
    words = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return jnp.sum(words, dtype=jnp.uint32)

  return [word_sum(leaf) for leaf in leaves]
