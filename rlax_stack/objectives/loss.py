"""The device's part of an objective: whole-batch preparation, then the loss of each micro-batch.

Not for the forward pass or the optimizer. Invariant: `policy_loss` added over the parts of a batch,
each with what `prepare` gave for the whole of it, is the loss of the batch.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.objectives import aggregation, metrics
from rlax_stack.objectives.boxes import BoundBox
from rlax_stack.objectives.inputs import (
  Correction,
  Denominators,
  LossInputs,
  LossParts,
  Statistics,
  clean,
)
from rlax_stack.objectives.objective import Objective
from rlax_stack.objectives.vocabulary import merged


class Prepared(NamedTuple):
  """What the whole batch says about its tokens.

  `tokens` is cut with the micro-batches; the rest is for all of them.
  """

  # [M, rows, N] arrays: weight_t, adv_t, statistics by slot; value_t, target_t with a critic
  tokens: dict[str, Any]
  scalars: dict[str, Any]  # statistics by slot
  denominators: Denominators
  step_scale: jax.Array | None = None  # factor of the optimizer's update; None: 1


def prepare(
  objective: Objective,
  inputs: LossInputs,
  state: dict[str, Any],
  gradient_norms: jax.Array | None = None,
) -> Prepared:
  """Weights, denominators and statistics of a whole batch.

  Args:
    objective: see Objective.
    inputs: [M, rows, N]; `weight_t` is not read. Where `objective.needs_scores`, the log-probs and
      the entropy are those of the current weights.
    state: from `Objective.init_state`.
    gradient_norms: [M, rows, N], ‖∇ Σ log π‖² of each token's trajectory, where
      `objective.needs_gradient_norms`.

  Returns: Prepared; nothing in it carries a gradient.
  """
  weights = objective.aggregation(inputs.mask_t, inputs.trajectory_t, inputs.group_t)
  inputs = _with_proximal(objective, clean(inputs._replace(weight_t=weights.weight_t)))
  bound, target_t = objective.advantage, None
  if objective.critic is not None:
    target_t = bound.call(bound.box.value_targets, inputs)
  if bound.box.token_advantages is not None:
    extras = {'state': state.get('advantage'), 'gradient_norms': gradient_norms}
    adv_t = bound.call(bound.box.token_advantages, inputs, **extras)
    inputs = inputs._replace(adv_t=jnp.where(inputs.mask_t, adv_t, 0.0))
  found: dict[str, Statistics] = {}
  for slot, bound in objective.device_boxes.items():
    if bound.box.batch_statistics is not None:
      extras = {'state': state.get(slot), 'vocabulary': inputs.vocabulary.get(slot, {})}
      if slot not in ('advantage', 'ratio'):
        extras['ratio'] = objective.ratio(
          inputs, state=state.get('ratio'), statistics=found.get('ratio')
        )
      found[slot] = bound.call(bound.box.batch_statistics, inputs, **extras)
  tokens = {
    'weight_t': inputs.weight_t,
    'adv_t': inputs.adv_t,
    'statistics': {slot: dict(s.tokens) for slot, s in found.items()},
  }
  if target_t is not None:
    tokens |= {'value_t': inputs.value_t, 'target_t': jnp.where(inputs.mask_t, target_t, 0.0)}
  scalars = {slot: dict(s.scalars) for slot, s in found.items()}
  trained = jnp.sum(inputs.mask_t.astype(jnp.float32))
  scales = [s.step_scale for s in found.values() if s.step_scale is not None]
  scale = math.prod(scales[1:], start=scales[0]) if scales else None
  prepared = Prepared(tokens, scalars, Denominators(weights.denominator, trained), scale)
  return jax.lax.stop_gradient(prepared)


def policy_loss(
  objective: Objective, inputs: LossInputs, prepared: Prepared, state: dict[str, Any]
) -> LossParts:
  """The share of one micro-batch in the loss of the batch.

  L = Σ aₜ cₜ ℓₜ / D + Σ_r Σ rₜ / D_r, with ℓₜ from the trust region, cₜ the product of the
  corrections, aₜ and D from the aggregation, rₜ and D_r of each regulariser

  Divided by: the global denominators of `prepared`, each term by its own.
  Gradient flows through: log_probs_t, what a `vocabulary` hook does not hold and, with a box tagged
  'entropy_gradient', entropy_t.
  See "AReaL", Fu et al. (https://arxiv.org/abs/2505.24298), for the decoupled form.

  Args:
    objective: see Objective.
    inputs: [rows, N]; `weight_t` and `adv_t` are taken from `prepared`.
    prepared: of the whole batch, its `tokens` cut to this micro-batch.
    state: as given to `prepare`.

  Returns: LossParts.
  """
  tokens = prepared.tokens
  inputs = clean(inputs._replace(weight_t=tokens['weight_t'], adv_t=tokens['adv_t']))
  inputs = _with_proximal(objective, inputs)
  if 'entropy_gradient' not in objective.tags:
    inputs = inputs._replace(entropy_t=jax.lax.stop_gradient(inputs.entropy_t))

  def run(slot: str, bound: BoundBox, *args: Any) -> Any:
    extras = _extras(slot, prepared, state) | {'vocabulary': inputs.vocabulary.get(slot, {})}
    return bound(*args, **extras)

  ratio = run('ratio', objective.ratio, inputs)
  trust = run('trust_region', objective.trust_region, ratio, inputs)
  correction = _product(
    [run(f'corrections/{i}', bound, inputs) for i, bound in enumerate(objective.corrections)],
    inputs,
  )
  corrected = jnp.where(correction.kept_t, trust.loss_t * correction.weight_t, 0.0)
  numerator = jnp.sum(jnp.where(inputs.mask_t, inputs.weight_t * corrected, 0.0))
  loss = numerator / jnp.maximum(prepared.denominators.policy, 1.0)
  named = dict(trust.metrics)
  for i, bound in enumerate(objective.regularisers):
    penalty = run(f'regularisers/{i}', bound, inputs)
    denominator = penalty.denominator
    denominator = prepared.denominators.tokens if denominator is None else denominator
    total = jnp.sum(jnp.where(inputs.mask_t, penalty.loss_t, 0.0))
    loss += total / jnp.maximum(denominator, 1.0)
    named |= penalty.metrics
  means = {name: aggregation.masked_mean(value, inputs.mask_t) for name, value in named.items()}
  parts = metrics.loss_metrics(inputs, ratio, trust, correction)
  held = jax.lax.stop_gradient(parts._replace(means=parts.means | means))
  return held._replace(loss=loss)


def _with_proximal(objective: Objective, inputs: LossInputs) -> LossInputs:
  """Takes the proximal log-probs from the ratio box, where it has its own."""
  bound = objective.ratio
  if bound.box.proximal is None:
    return inputs
  proximal = jax.lax.stop_gradient(bound.call(bound.box.proximal, inputs))
  return inputs._replace(proximal_log_probs_t=jnp.where(inputs.mask_t, proximal, 0.0))


def _extras(slot: str, prepared: Prepared, state: dict[str, Any]) -> dict[str, Any]:
  """What a box is handed beyond its arguments, where its signature names it."""
  extras: dict[str, Any] = {}
  if slot in prepared.scalars:
    extras['statistics'] = Statistics(
      tokens=prepared.tokens['statistics'][slot], scalars=prepared.scalars[slot]
    )
  if slot in state:
    extras['state'] = state[slot]
  return extras


def _product(corrections: list[Correction], inputs: LossInputs) -> Correction:
  """All corrections as one, held constant; weight 1 and nothing dropped where there are none."""
  mask = inputs.mask_t
  total = Correction(jnp.ones(mask.shape, jnp.float32), jnp.ones_like(mask), jnp.zeros_like(mask))
  for one in corrections:
    total = Correction(
      total.weight_t * one.weight_t,
      total.kept_t & one.kept_t,
      total.truncated_t | one.truncated_t,
    )
  return jax.lax.stop_gradient(total)


def loss_inputs(batch: Any, scored: Any, *, version: jax.Array, score_proximal: bool) -> LossInputs:
  """LossInputs of packed rows.

  Args:
    batch: PackedBatch, [rows, N] or [M, rows, N] triples.
    scored: log_prob, entropy and vocabulary (by slot) of every triple under the current weights, or
      None where nothing was scored (0 and nothing).
    version: int32 scalar, the learner's version.
    score_proximal: True reads `proximal_log_probs_t` of the batch; False takes the current policy
      itself, held constant, as the proximal one, so that the ratio is exactly 1.
  """
  zero = jnp.zeros(batch.mask_t.shape, jnp.float32)
  log_probs, entropy = (zero, zero) if scored is None else (scored.log_prob, scored.entropy)
  held = jax.lax.stop_gradient(log_probs)
  terms = {} if scored is None else scored.vocabulary
  return LossInputs(
    log_probs_t=log_probs,
    entropy_t=entropy,
    proximal_log_probs_t=batch.proximal_log_probs_t if score_proximal else held,
    behaviour_log_probs_t=batch.behaviour_log_probs_t,
    anchor_log_probs_t=batch.anchor_log_probs_t,
    adv_t=batch.adv_t,
    reward_t=batch.reward_t,
    mask_t=batch.mask_t,
    weight_t=zero,
    trajectory_t=batch.trajectory_t,
    group_t=batch.group_t,
    turn_t=batch.turn_t,
    version_t=batch.version_t,
    staleness_t=version - batch.version_t,
    vocabulary=merged(batch.proximal_vocabulary, terms),
    value_t=batch.value_t,
    next_value_t=batch.next_value_t,
    teacher_log_probs_t=batch.teacher_log_probs_t,
  )
