"""Rows whose tokens lie over the mesh axis `context`, as the parts that the devices hold.

What looks at one token at a time (embedding, projections, experts, the LM head) takes parts as if they were rows: it
folds rows and tokens into one axis, which is split evenly only so. Attention takes rows.
Not for attention or scores. Invariant: nothing here gathers a row; without `context` parts are rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlax_stack.errors import ConfigError
from rlax_stack.sharding import DEFAULT_RULES, row_shards


def in_parts(tree: Any, mesh: Mesh | None) -> Any:
  """[R, T, ...] arrays as [R * parts, T / parts, ...], the first axis over data, fsdp, expert and context.

  Every device keeps what it has, so the order of parts is that of the devices: see `in_rows`.
  """
  parts = _parts(mesh)
  if mesh is None or parts == 1:
    return tree
  groups = row_shards(mesh.shape)

  def one(x):
    rows, tokens, *rest = x.shape
    x = x.reshape(groups, rows // groups, parts, tokens // parts, *rest)
    x = x.swapaxes(1, 2).reshape(rows * parts, tokens // parts, *rest)
    return _constrained(x, mesh, ('row_parts', None))

  return jax.tree.map(one, tree)


def in_rows(tree: Any, mesh: Mesh | None) -> Any:
  """What `in_parts` was given, from arrays of its form."""
  parts = _parts(mesh)
  if mesh is None or parts == 1:
    return tree
  groups = row_shards(mesh.shape)

  def one(x):
    pieces, tokens, *rest = x.shape
    x = x.reshape(groups, parts, pieces // (groups * parts), tokens, *rest)
    x = x.swapaxes(1, 2).reshape(pieces // parts, parts * tokens, *rest)
    return _constrained(x, mesh, ('rows', 'tokens'))

  return jax.tree.map(one, tree)


def target_states(hidden: jax.Array, source_index: jax.Array, mesh: Mesh | None) -> jax.Array:
  """Hidden states of the places that predict the targets.

  The place of a target may lie on any device of `context`. So a sum for each part of the targets goes round: every
  device adds the states that it holds, and the last is the one that the part belongs to.

  Args:
    hidden: [R, T, D].
    source_index: int32 [R, N], places in the row.
    mesh: where they live.

  Returns: [R, N, D], N split over `context`.

  Raises:
    ConfigError: N that does not divide over `context`.
  """
  parts = _parts(mesh)
  if mesh is None or parts == 1:
    return jnp.take_along_axis(hidden, source_index[..., None], axis=1)
  rows, count = source_index.shape
  if count % parts:
    raise ConfigError(
      f'rows of {count} targets do not divide over config.learner.mesh.context = {parts}. Plan them with '
      f'plan_rows(context={parts}), which leaves room for {-(-count // parts) * parts}.'
    )
  ring = [(i, (i + 1) % parts) for i in range(parts)]

  def part(hidden, index):
    own, (held, length) = lax.axis_index('context'), hidden.shape[:2]
    index = index.reshape(held, parts, -1) - own * length

    def held_here(target):
      place = lax.dynamic_index_in_dim(index, target % parts, axis=1, keepdims=False)
      here = (place >= 0) & (place < length)
      found = jnp.take_along_axis(hidden, jnp.where(here, place, 0)[..., None], axis=1)
      return jnp.where(here[..., None], found, 0)

    def hop(number, total):
      return lax.ppermute(total, 'context', ring) + held_here(own - 1 - number)

    return lax.fori_loop(1, parts, hop, held_here(own - 1))

  by_token = DEFAULT_RULES.spec_for(('rows', 'tokens', 'features'))
  by_row = DEFAULT_RULES.spec_for(('rows', None))
  split = jax.shard_map(part, mesh=mesh, in_specs=(by_token, by_row), out_specs=by_token)
  return split(hidden, source_index)


def _parts(mesh: Mesh | None) -> int:
  return 1 if mesh is None else mesh.shape['context']


def _constrained(x: jax.Array, mesh: Mesh, axes: tuple[str | None, ...]) -> jax.Array:
  """x with its first axes split as said, the others (heads, say) as they are."""
  free = (P.UNCONSTRAINED,) * (x.ndim - len(axes))
  spec = P(*DEFAULT_RULES.spec_for(axes), *free)
  return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
