"""Log-probs of the same samples after another prompt: what the scorer knows of the task is not what the sampler knew.

Each sample stands a second time in rows of its own, behind the other prompt, and its scores return to where the tokens
are trained. For a policy that teaches itself with the answer at hand (on-policy self-distillation), or a teacher that
is given more than the policy. Invariant: a trained token is scored after exactly the other prompt and the sample's
tokens before it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.errors import DataError
from rlax_stack.learner import multihost, packing
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import rows_sharding
from rlax_stack.types import Group, PackedBatch, Source, Trajectory


class OtherRows(NamedTuple):
  """A batch behind other prompts, and where each of its scores belongs."""

  batch: PackedBatch  # [M', rows', ...] on the mesh
  num_micro: jax.Array
  place: (
    jax.Array
  )  # int32 [M, rows, N], index into the flat scores of `batch`; -1 where nothing is trained

  def in_place(self, scores: jax.Array) -> jax.Array:
    """Scores [M', rows', N'] of `batch` at the triples of the rows that are trained, 0 elsewhere."""
    return _in_place(scores, self.place)


@jax.jit
def _in_place(scores: jax.Array, place: jax.Array) -> jax.Array:
  found = jnp.take(scores.reshape(-1), jnp.maximum(place, 0))
  return jnp.where(place >= 0, found, 0.0)


@dataclasses.dataclass(frozen=True)
class OtherContext:
  """How samples get behind another prompt.

  tokens_of: the other prompt of a group, int32 [P']. rows: shape of the rows that they are packed into.
  weigh_places: for mixtures of experts.
  """

  tokens_of: Callable[[Group], np.ndarray]
  rows: RowPlan
  weigh_places: bool = False

  def rows_of(
    self, groups: Sequence[Group], packed: PackedBatch, shape: tuple[int, ...], mesh: Mesh
  ) -> OtherRows:
    """The rows of a batch behind other prompts.

    Args:
      groups: as `packed` was made of.
      packed: rows that are trained, on the host.
      shape: [M, rows, N] of its triples on the mesh.
      mesh: where they live.

    Raises:
      DataError: samples that forgot a part of their context on the way.
    """
    moved = [behind(group, self.tokens_of(group)) for group in groups]
    other = packing.pack_groups(
      moved,
      [np.zeros(len(group.trajectories), np.float32) for group in moved],
      row_shapes=[self.rows.shape],
      rows_multiple=self.rows.micro_batch_rows,
      weigh_places=self.weigh_places,
    )
    rows = self.rows.micro_batch_rows
    num_micro = other.tokens.shape[0] // rows
    capacity = self.rows.max_micro_batches
    if num_micro > capacity:
      capacity = 1 << (num_micro - 1).bit_length()
    padded = packing.pad_rows(other, capacity * rows)
    cut = jax.tree.map(lambda x: x.reshape(capacity, rows, *x.shape[1:]), padded)
    place = np.full((shape[0] * shape[1], shape[2]), -1, np.int32)
    place[: packed.tokens.shape[0]] = places(packed, other)
    where = rows_sharding(mesh)
    return OtherRows(
      batch=multihost.place(cut, where),
      num_micro=multihost.place(np.int32(num_micro), NamedSharding(mesh, PartitionSpec())),
      place=multihost.place(place.reshape(shape), where),
    )


def behind(group: Group, prompt: np.ndarray) -> Group:
  """The group with another prompt before the same samples."""
  count = len(group.prompt_tokens)
  moved = tuple(_behind(trajectory, count, prompt) for trajectory in group.trajectories)
  return dataclasses.replace(group, prompt_tokens=prompt, trajectories=moved)


def _behind(trajectory: Trajectory, count: int, prompt: np.ndarray) -> Trajectory:
  if trajectory.context_starts:
    raise DataError(
      f'sample {trajectory.sample_index} of prompt {trajectory.prompt_id} went on without a part of its context, which '
      'has no place behind another prompt. Leave config.learner.teacher_context empty, or take another '
      'config.rollout.strategy.'
    )

  def after(values: np.ndarray | None, fill: Any) -> Any:
    if values is None:
      return None
    first = np.full((len(prompt), *values.shape[1:]), fill, values.dtype)
    return np.concatenate([first, values[count:]])

  return dataclasses.replace(
    trajectory,
    tokens=np.concatenate([prompt, trajectory.tokens[count:]]).astype(np.int32),
    source_t=after(trajectory.source_t, Source.PROMPT),
    mask_t=after(trajectory.mask_t, False),
    behaviour_log_probs_t=after(trajectory.behaviour_log_probs_t, 0.0),
    raw_log_probs_t=after(trajectory.raw_log_probs_t, 0.0),
    version_t=after(trajectory.version_t, -1),
    kept_ids_t=after(trajectory.kept_ids_t, -1),
    experts_t=None,
    branch=None,
  )


def places(packed: PackedBatch, other: PackedBatch) -> np.ndarray:
  """For every triple of `packed` the flat index of the same token's triple in `other`; -1 at padding.

  Both hold the triples of a trajectory side by side, in the order of its tokens.
  """
  mine, theirs = (np.asarray(rows.trajectory_t).reshape(-1) for rows in (packed, other))
  order = np.argsort(theirs, kind='stable')
  first_of = np.searchsorted(theirs[order], mine)
  own = np.argsort(mine, kind='stable')
  rank = np.empty_like(own)
  rank[own] = np.arange(len(own)) - np.searchsorted(mine[own], mine[own])
  found = order[np.minimum(first_of + rank, len(order) - 1)]
  return np.where(mine >= 0, found, -1).astype(np.int32).reshape(packed.trajectory_t.shape)
