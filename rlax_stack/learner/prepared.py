"""A batch that is packed and on the devices."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from rlax_stack.learner.other_context import OtherRows
from rlax_stack.types import Group, PackedBatch


class PreparedBatch(NamedTuple):
  """What `Learner.train` works on."""

  groups: tuple[Group, ...]
  state_before: dict[str, Any]  # of the boxes on the host
  host_state: dict[str, Any]  # after the batch
  stats: dict[str, Any]
  digest: str  # of the packed rows, see multihost.digest
  batch: PackedBatch  # [M, rows, ...] on the mesh
  num_micro: jax.Array
  other: OtherRows | None = None  # the same samples behind other prompts

  def is_of(self, groups: Sequence[Group], host_state: dict[str, Any]) -> bool:
    """Whether it is what these very groups give after that state."""
    same = len(groups) == len(self.groups) and all(map(operator.is_, groups, self.groups))
    return same and host_state is self.state_before
