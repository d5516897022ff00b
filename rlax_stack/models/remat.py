"""What the backward pass keeps of each layer, what it computes again and what waits in host memory.

Not for what is always computed again (the norms and the gate of the MLP, `decoder.py`). Invariant: a
policy changes memory and time, never a gradient.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from rlax_stack.config import nearest
from rlax_stack.errors import ConfigError
from rlax_stack.pallas_kernels.saved_names import ATTENTION

_LAYER_INPUT = 'layer_input'
_HOST = 'pinned_host'


def _offload(*names: str) -> Any:
  return jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(names),
    offload_src='device',
    offload_dst=_HOST,
  )


# What is kept of a layer beside its input, which is kept always; the rest is computed again.
REMAT_POLICIES = {
  'none': None,  # everything is kept
  'layer': jax.checkpoint_policies.nothing_saveable,
  'attention': jax.checkpoint_policies.save_only_these_names(ATTENTION),
  'dots': jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
  'dots_attention': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    jax.checkpoint_policies.save_only_these_names(ATTENTION),
  ),
  # The same, kept in the memory of the host.
  'offload_layer': _offload(_LAYER_INPUT),
  'offload_attention': _offload(_LAYER_INPUT, ATTENTION),
  'offload_dots': jax.checkpoint_policies.offload_dot_with_no_batch_dims('device', _HOST),
}


def remat_policy(name: str) -> Any:
  """The policy called `name`; None where everything is kept.

  Raises:
    ConfigError: no such policy.
  """
  if name not in REMAT_POLICIES:
    raise ConfigError(f'unknown remat {name!r}.{nearest(name, REMAT_POLICIES)}')
  return REMAT_POLICIES[name]


def named_input(x: jax.Array) -> jax.Array:
  """What enters a layer, by the name that the offload policies know it by."""
  return checkpoint_name(x, _LAYER_INPUT)


def check_offload(name: str, device: Any) -> None:
  """Refuses a policy that needs memory which `device` does not have.

  Raises:
    ConfigError: an offload policy, and no pinned host memory.
  """
  if not name.startswith('offload_'):
    return
  kinds = sorted(memory.kind for memory in device.addressable_memories())
  if _HOST not in kinds:
    raise ConfigError(
      f'remat={name} keeps activations in {_HOST} memory, which {device.device_kind} lacks: it has '
      f'{", ".join(kinds)}. Set config.learner.remat to layer or attention.'
    )
