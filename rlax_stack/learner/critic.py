"""A critic's parameters, its values of packed rows, and its updates.

Not for which critic there is or its loss (objectives/critics). Invariants: one function, `row_values`,
serves the loss and the scores, so that equal weights give equal values; the values of a batch are
scored once, before its first update.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.errors import ConfigError
from rlax_stack.learner import multihost
from rlax_stack.learner.optimizer import OptimizerSettings, make_optimizer
from rlax_stack.learner.scoring import (
  ForwardSettings,
  micro_batch,
  row_states,
  rows_sharding,
  weight_shapes,
)
from rlax_stack.models import decoder
from rlax_stack.models.adapter import model_weights
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.critics.networks import CriticSettings
from rlax_stack.sharding import param_shardings
from rlax_stack.types import PackedBatch

_ATTENTION = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'q_norm', 'k_norm')


def init_params(critic: CriticSettings, params: Any) -> Any:
  """Parameters of a fresh critic: a value head of zeros, on a copy of the policy or on nothing.

  Args:
    critic: see CriticSettings.
    params: the policy's, nested dict of arrays.
  """
  width = params['final_norm']['scale'].shape[0]
  head = {'kernel': jnp.zeros((1, width), jnp.float32), 'bias': jnp.zeros((1,), jnp.float32)}
  if critic.shared:
    return {'value_head': head}
  trunk = {name: leaf for name, leaf in params.items() if name != 'lm_head'}
  # A copy, so that the state never holds one buffer twice.
  return jax.tree.map(jnp.copy, trunk) | {'value_head': head}


def make_state(
  critic: CriticSettings | None, optimizer: OptimizerSettings, policy: Any = None
) -> Callable[[Any], Any]:
  """Function (what is trained) -> what `LearnerState.critic` holds: {} without a critic.

  Args:
    critic: see CriticSettings.
    optimizer: of the policy.
    policy: shapes of the whole model, where an adapter is trained; a critic that is not shared needs arrays.
  """
  if critic is None:
    return lambda params: {}
  transform = make_optimizer(critic_optimizer(critic, optimizer))

  def make(params):
    fresh = init_params(critic, params if policy is None else policy)
    return {'params': fresh, 'opt_state': transform.init(fresh)}

  return make


def critic_optimizer(critic: CriticSettings, optimizer: OptimizerSettings) -> OptimizerSettings:
  """The policy's optimizer with the critic's rate, and a schedule over the critic's own updates."""
  return dataclasses.replace(
    optimizer,
    learning_rate=critic.learning_rate or optimizer.learning_rate,
    warmup_steps=optimizer.warmup_steps * critic.updates,
    total_steps=(optimizer.total_steps + critic.pretrain_updates) * critic.updates,
  )


def row_values(
  critic: CriticSettings,
  critic_params: Any,
  hidden: jax.Array | None,
  config: ModelConfig,
  rows: PackedBatch,
  forward: ForwardSettings,
  mesh: Mesh | None = None,
) -> jax.Array:
  """Value of the state after every place of the rows, float32 [R, T].

  Args:
    critic: see CriticSettings.
    critic_params: from `init_params`.
    hidden: the policy's hidden states of the rows, [R, T, D]; read by a shared trunk only.
    config: shape of the policy's model.
    rows: [R, T] rows.
    forward: see ForwardSettings.
    mesh: where rows and parameters live.
  """
  if critic.shared:
    if hidden is None:
      raise ValueError('a critic that shares the trunk needs the hidden states of the policy.')
    held = jax.lax.stop_gradient(hidden)
    hidden = held + critic.trunk_coef * (hidden - held) if critic.trunk_coef else held
  else:
    # A tied model has no LM head of its own to be filled in.
    trunk = dataclasses.replace(config, tie_embeddings=True)
    params = {name: leaf for name, leaf in critic_params.items() if name != 'value_head'}
    # A model of its own has routers of its own.
    hidden = row_states(params, trunk, rows._replace(experts=None), forward, mesh)
  head = critic_params['value_head']
  # A product and a sum, not a matmul: those round their operands on some devices.
  weighted = hidden.astype(jnp.float32) * head['kernel'].astype(jnp.float32)[None]
  return jnp.sum(weighted, axis=-1) + head['bias'].astype(jnp.float32)[None]


def values_before(value: jax.Array, rows: PackedBatch) -> jax.Array:
  """Value of the state before every target, float32 [R, N], from `row_values`."""
  return jnp.take_along_axis(value, rows.source_index_t, axis=1)


def values_after(value: jax.Array, rows: PackedBatch) -> jax.Array:
  """Value of the state after every target, float32 [R, N]; 0 where the trajectory ended."""
  goes_on = rows.next_index_t >= 0
  place = jnp.where(goes_on, rows.next_index_t, 0)
  return jnp.where(goes_on, jnp.take_along_axis(value, place, axis=1), 0.0)


@functools.lru_cache(maxsize=8)
def make_value_score(
  config: ModelConfig, mesh: Mesh, forward: ForwardSettings, critic: CriticSettings
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Values of a batch, compiled at the first call and shared by equal arguments.

  Returns: function (policy's params, critic's params, batch [M, rows, ...], num_micro int32 scalar)
    -> (value_t, next_value_t), float32 [M, rows, N], 0 in micro-batches from num_micro on. With an adapter
    the policy's params are the adapter, and the frozen weights are a fifth argument.
  """

  def score(params, critic_params, batch, num_micro, *frozen):
    params = model_weights(forward.adapter, params, *frozen)

    def body(index, total):
      rows = micro_batch(batch, index)
      hidden = row_states(params, config, rows, forward, mesh) if critic.shared else None
      value = row_values(critic, critic_params, hidden, config, rows, forward, mesh)
      parts = values_before(value, rows), values_after(value, rows)
      return jax.tree.map(lambda whole, part: whole.at[index].set(part), total, parts)

    zeros = jnp.zeros(batch.mask_t.shape, jnp.float32)
    return jax.lax.fori_loop(0, num_micro, body, (zeros, zeros))

  own = jax.eval_shape(functools.partial(init_params, critic), decoder.abstract_params(config))
  trained, frozen = weight_shapes(config, forward)
  trained, own, frozen = param_shardings((trained, own, frozen), mesh)
  rows, replicated = rows_sharding(mesh), NamedSharding(mesh, PartitionSpec())
  return jax.jit(score, in_shardings=(trained, own, rows, replicated, *frozen), out_shardings=rows)


def updated(
  critic: CriticSettings, transform: optax.GradientTransformation, gradient: Any, state: Any
) -> tuple[Any, jax.Array]:
  """The critic's state after one update, and the norm of the gradient it was made with.

  Args:
    critic: see CriticSettings.
    transform: from `make_optimizer(critic_optimizer(...))`.
    gradient: tree of the critic's parameters.
    state: from `make_state`.
  """
  if critic.freeze_attention:
    gradient = _without_attention(gradient)
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = transform.update(gradient, state['opt_state'], state['params'])
  if critic.freeze_attention:  # weight decay moves what has no gradient
    updates = _without_attention(updates)
  params = optax.apply_updates(state['params'], updates)
  return {'params': params, 'opt_state': opt_state}, optax.tree.norm(gradient)


def _without_attention(tree: Any) -> Any:
  """The tree with 0 at the attention's projections."""

  def one(path, leaf):
    frozen = any(getattr(key, 'key', None) in _ATTENTION for key in path)
    return jnp.zeros_like(leaf) if frozen else leaf

  return jax.tree_util.tree_map_with_path(one, tree)


def taken_over(found: Any, fresh: Any, source: str) -> Any:
  """The parameters `found` in an earlier run, placed as those of a fresh critic.

  Args:
    found: nested dict of numpy arrays.
    fresh: the critic's parameters of this run, on the mesh.
    source: where they come from, for the message.

  Raises:
    ConfigError: other parameters or shapes than this critic has.
  """
  shapes = [
    {
      jax.tree_util.keystr(path): leaf.shape
      for path, leaf in jax.tree_util.tree_leaves_with_path(t)
    }
    for t in (found, fresh)
  ]
  if shapes[0] != shapes[1]:
    differing = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0]
    raise ConfigError(
      f'the critic of {source} has other parameters than this one, such as {differing[0]} of shape '
      f'{differing[1]}. Set warm_start of config.objective.critic to a run of the same model and box.'
    )
  return jax.tree.map(
    lambda new, old: multihost.place(np.asarray(new, np.float32), old.sharding), found, fresh
  )
