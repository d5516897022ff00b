"""Optimizer state in bfloat16, rounded stochastically.

Not for parameters or gradients. Invariant: the random bits follow from the run's seed, the number of
updates and the array alone, so that a run that goes on from a checkpoint, on whatever mesh, rounds as
it would have.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from rlax_stack.rng import update_key
from rlax_stack.sharding import parameter_name


class RoundedState(NamedTuple):
  """State of `rounded_state`: the updates made, int32 scalar, and the wrapped transform's own state."""

  count: Any
  inner: Any


def stochastic_round(key: jax.Array, x: jax.Array) -> jax.Array:
  """x as bfloat16: one of its two neighbours, the nearer one the more often, so that the mean is x.

  The lower 16 bits of x, which bfloat16 lacks, are the probability of the neighbour farther from 0.
  See "Revisiting BFloat16 Training", Zamirai et al. (https://arxiv.org/abs/2010.06192).

  Args:
    key: typed jax key; consumed.
    x: float32 of any shape. What bfloat16 can hold is kept as it is, NaN and infinities too.
  """
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  words = lax.bitcast_convert_type(x, jnp.uint32) + noise
  upper = lax.shift_right_logical(words, jnp.full_like(words, 16)).astype(jnp.uint16)
  rounded = lax.bitcast_convert_type(upper, jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def rounded_state(
  transform: optax.GradientTransformation, *, seed: int
) -> optax.GradientTransformation:
  """`transform`, computing in float32 and keeping what mirrors parameters in bfloat16.

  Args:
    transform: its float32 arrays with the name of a parameter (moments) are kept smaller; counts and
      constants as they are.
    seed: of the run, in [0, 2**32).
  """

  def init(params):
    names = {parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}

    def one(path, leaf):
      smaller = leaf.dtype == jnp.float32 and parameter_name(path) in names
      return leaf.astype(jnp.bfloat16) if smaller else leaf

    inner = jax.tree_util.tree_map_with_path(one, transform.init(params))
    return RoundedState(jnp.zeros((), jnp.int32), inner)

  def update(updates, state, params=None):
    wide = jax.tree.map(
      lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state.inner
    )
    updates, new = transform.update(updates, wide, params)
    key = update_key(seed, state.count)
    leaves, tree = jax.tree.flatten(new)
    olds = jax.tree.leaves(state.inner)
    rounded = [
      stochastic_round(jax.random.fold_in(key, i), x) if old.dtype == jnp.bfloat16 else x
      for i, (x, old) in enumerate(zip(leaves, olds, strict=True))
    ]
    return updates, RoundedState(state.count + 1, jax.tree.unflatten(tree, rounded))

  return optax.GradientTransformation(init, update)
