"""One optimizer step over a packed batch, as one jit over the mesh.

Not for packing, and nothing here waits for the device. Invariants: every mean is summed over
micro-batches and divided once by the global count; the step computes the same update however the
batch is cut into micro-batches and rows; an update with a non-finite loss or gradient leaves
parameters and moments as they were.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.learner.gradient_norms import squared_gradient_norms
from rlax_stack.learner.optimizer import OptimizerSettings, learning_rate_schedule, make_optimizer
from rlax_stack.learner.scoring import (
  ForwardSettings,
  micro_batch,
  rows_sharding,
  score_batch,
  target_log_probs,
)
from rlax_stack.learner.state import (
  LearnerState,
  abstract_state,
  averaged,
  state_shardings,
  updates_applied,
)
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.inputs import LossParts, added
from rlax_stack.objectives.loss import loss_inputs, policy_loss, prepare
from rlax_stack.objectives.metrics import finished
from rlax_stack.objectives.objective import Objective
from rlax_stack.objectives.vocabulary import current_terms
from rlax_stack.types import PackedBatch

TrainStep = Callable[[LearnerState, PackedBatch, jax.Array], tuple[LearnerState, dict[str, Any]]]


class _Total(NamedTuple):
  """What micro-batches add up to."""

  gradient: Any  # float32, the parameters' tree
  parts: LossParts


@functools.lru_cache(maxsize=8)
def make_train_step(
  config: ModelConfig,
  mesh: Mesh,
  *,
  forward: ForwardSettings,
  objective: Objective,
  optimizer: OptimizerSettings,
  score_proximal: bool = False,
) -> TrainStep:
  """The train step, compiled at its first call and shared by equal arguments.

  The number of micro-batches is an argument, not a shape: one program serves every batch of a run.

  Args:
    config: shape of the model.
    mesh: where rows and parameters live.
    forward: see ForwardSettings.
    objective: see Objective.
    optimizer: see OptimizerSettings.
    score_proximal: True reads `proximal_log_probs_t` from the batch; False takes the current policy
      itself as the proximal one (one update per batch: the ratio is exactly 1).

  Returns: function (state, batch of [M, rows, ...] arrays, num_micro int32 scalar) -> (state,
    metrics). The state given is donated. Micro-batches from num_micro on are not computed; they
    must be masked. `metrics` are float32 scalars on the device.
  """
  transform, schedule = make_optimizer(optimizer), learning_rate_schedule(optimizer)
  terms = current_terms(objective, score_proximal=score_proximal)
  whole_terms = current_terms(objective, score_proximal=score_proximal, statistics=True)

  def step(state, batch, num_micro):
    scored = None
    if objective.needs_scores:
      held = jax.lax.stop_gradient(state.params)
      scored = score_batch(held, config, batch, num_micro, forward, mesh, whole_terms)
    settings = {'version': state.version, 'score_proximal': score_proximal}
    whole, norms = loss_inputs(batch, scored, **settings), None
    if objective.needs_gradient_norms:
      norms = squared_gradient_norms(state.params, config, batch, num_micro, forward, mesh)
    prepared = prepare(objective, whole, state.objective, norms)

    def part(params, index):
      rows = micro_batch(batch, index)
      cut = prepared._replace(tokens=micro_batch(prepared.tokens, index))
      scored = target_log_probs(params, config, rows, forward, mesh, terms)
      out = policy_loss(objective, loss_inputs(rows, scored, **settings), cut, state.objective)
      return out.loss, out

    total = _accumulate(part, state.params, num_micro)
    return _apply(state, total, prepared, objective, transform, schedule)

  params = decoder.abstract_params(config)
  average = objective.average_decay is not None
  shapes = abstract_state(params, transform, mesh, objective.init_state, average)
  shardings = state_shardings(shapes, mesh)
  replicated = NamedSharding(mesh, PartitionSpec())
  return jax.jit(
    step,
    in_shardings=(shardings, rows_sharding(mesh), replicated),
    out_shardings=(shardings, replicated),
    donate_argnums=0,
  )


def _accumulate(part: Callable, params: Any, num_micro: jax.Array) -> _Total:
  """Adds up value, gradient and metrics of `part(params, index)` over the micro-batches in use."""

  def body(index, total):
    (_, out), gradient = jax.value_and_grad(part, has_aux=True)(params, index)
    return _Total(jax.tree.map(jnp.add, total.gradient, gradient), added(total.parts, out))

  _, out = jax.eval_shape(lambda: part(params, jnp.int32(0)))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), _Total(params, out))
  return jax.lax.fori_loop(0, num_micro, body, zeros)


def _apply(state, total, prepared, objective, transform, schedule):
  """Updates the state, or leaves all but the counters alone where something is not finite."""
  gradient, loss = total.gradient, total.parts.loss
  norm = optax.tree.norm(gradient)
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  # optax mixes its int32 counters with float32, which strict promotion refuses.
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = transform.update(gradient, state.opt_state, state.params)
    learning_rate = schedule(updates_applied(state))
  scale = prepared.step_scale
  if scale is not None:
    updates = jax.tree.map(lambda x: scale * x, updates)
  params = optax.apply_updates(state.params, updates)
  measured = finished(total.parts)
  carried = objective.update_state(state.objective, measured | {'loss': loss})
  average, decay = state.average, objective.average_decay
  if decay is not None:
    average = averaged(average, params, decay)
  # A select on every leaf fuses into the update; no branch, no wait for the host.
  params, opt_state, carried, average = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old),
    (params, opt_state, carried, average),
    (state.params, state.opt_state, state.objective, state.average),
  )
  bad = jnp.where(finite, 0, 1)
  new_state = LearnerState(
    params=params,
    opt_state=opt_state,
    version=state.version,
    step=state.step + 1,
    skipped=state.skipped + bad,
    skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
    objective=carried,
    average=average,
  )
  metrics = (
    measured
    | {
      'loss': loss,
      'grad_norm': norm,
      'learning_rate': learning_rate,
      'trained_tokens': prepared.denominators.tokens,
      'skipped': new_state.skipped,
      'skipped_in_row': new_state.skipped_in_row,
    }
    | ({} if scale is None else {'step_scale': scale})
  )
  return new_state, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)
