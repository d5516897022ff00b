"""What the learner carries from step to step, as one pytree: parameters, optimizer, counters.

Not for what belongs to the run (prompt iterator, ledger): the checkpoint stores that beside it.
Invariant: `version` grows by exactly 1 with every batch, whether its update was applied or skipped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.learner import multihost
from rlax_stack.sharding import optimizer_shardings, param_shardings


class LearnerState(NamedTuple):
  """All counters are int32 scalars. The same tree also holds the shapes or shardings of its leaves."""

  params: Any  # what is trained, float32: the nested dict of models/decoder.py, or an adapter's
  opt_state: Any
  version: Any  # batches trained: the weights version that comes out of the last one
  step: Any  # optimizer updates tried
  skipped: Any  # updates skipped for a non-finite loss or gradient, since the start
  skipped_in_row: Any  # the same, since the last update that was applied
  objective: Any  # what boxes carry from step to step (`Objective.init_state`); {} for most
  critic: Any = {}  # params and opt_state of the critic; {} without one
  average: Any = {}  # {'params', 'weight'} where a ratio's proximal policy is averaged weights


def state_shardings(state: Any, mesh: Mesh) -> Any:
  """NamedSharding of every leaf: the optimizer's as their parameters, counters replicated."""
  replicated = NamedSharding(mesh, PartitionSpec())
  return LearnerState(
    params=param_shardings(state.params, mesh),
    opt_state=optimizer_shardings(state.opt_state, state.params, mesh),
    version=replicated,
    step=replicated,
    skipped=replicated,
    skipped_in_row=replicated,
    objective=jax.tree.map(lambda _: replicated, state.objective),
    average=param_shardings(state.average, mesh),
    critic=_critic_shardings(state.critic, mesh),
  )


def _critic_shardings(critic: Any, mesh: Mesh) -> Any:
  if not critic:
    return {}
  params = critic['params']
  opt_state = optimizer_shardings(critic['opt_state'], params, mesh)
  return {'params': param_shardings(params, mesh), 'opt_state': opt_state}


def _no_critic(params: Any) -> Any:
  del params
  return {}


def abstract_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  make_objective_state: Callable[[], Any] = dict,
  make_critic_state: Callable[[Any], Any] = _no_critic,
  keep_average: bool = False,
) -> Any:
  """Shapes, dtypes and shardings of a state over `params` (arrays or shapes); allocates nothing."""
  makers = make_objective_state, make_critic_state
  shapes = jax.eval_shape(lambda p: _fresh(p, optimizer, *makers, keep_average), params)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    state_shardings(shapes, mesh),
  )


def init_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  make_objective_state: Callable[[], Any] = dict,
  make_critic_state: Callable[[Any], Any] = _no_critic,
  keep_average: bool = False,
) -> LearnerState:
  """A fresh state on `mesh`; the arrays of `params` are copied, the caller keeps its own.

  Args:
    params: nested dict of arrays of any float dtype; the master copy is float32.
    optimizer: from `optimizer.make_optimizer`.
    mesh: from `sharding.make_mesh`.
    make_objective_state: `Objective.init_state`.
    make_critic_state: from `critic.make_state`.
    keep_average: whether an average of the weights is kept; it starts from them.

  Returns: LearnerState at version 0.
  """
  makers = make_objective_state, make_critic_state
  shapes = abstract_state(params, optimizer, mesh, *makers, keep_average)
  shardings = state_shardings(shapes, mesh)
  # Through the host: a state is donated at every step, so it must not share buffers with the
  # caller.
  host = jax.tree.map(lambda leaf: np.array(multihost.fetch(leaf), dtype=np.float32), params)
  placed = multihost.place(host, shardings.params)

  def fresh(params):
    return _fresh(params, optimizer, *makers, keep_average)

  return jax.jit(fresh, out_shardings=shardings, donate_argnums=0)(placed)


def _fresh(
  params: Any,
  optimizer: optax.GradientTransformation,
  make_objective_state: Callable[[], Any],
  make_critic_state: Callable[[Any], Any],
  keep_average: bool,
) -> LearnerState:
  master = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
  zero = jnp.zeros((), jnp.int32)
  carried = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), make_objective_state())
  critic = make_critic_state(master)
  average = {'params': jax.tree.map(jnp.copy, master), 'weight': jnp.float32(1.0)}
  return LearnerState(
    params=master,
    opt_state=optimizer.init(master),
    version=zero,
    step=zero,
    skipped=zero,
    skipped_in_row=zero,
    objective=carried,
    critic=critic,
    average=average if keep_average else {},
  )


def averaged(average: Any, params: Any, decay: float) -> Any:
  """The average of all weights so far, those of k updates ago weighing decay^k.

  W' = βW + 1,  θ̄' = (βW/W') θ̄ + θ/W', from W = 1 at the weights of the start: no bias towards them.

  See "Batch size-invariance for policy optimization", Hilton et al.
  (https://arxiv.org/abs/2110.00641).

  Args:
    average: {'params', 'weight'}.
    params: the weights after an update.
    decay: β.
  """
  weight = decay * average['weight'] + 1.0
  keep, take = decay * average['weight'] / weight, 1.0 / weight
  mixed = jax.tree.map(lambda old, new: keep * old + take * new, average['params'], params)
  return {'params': mixed, 'weight': weight}


def updates_applied(state: LearnerState) -> jax.Array:
  """Number of updates that changed the parameters, int32 scalar: where the schedule stands."""
  return state.step - state.skipped
