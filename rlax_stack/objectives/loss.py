"""The policy loss, composed from the boxes beside this file: ratio, trust region, correction, KL,
entropy.

Not for means over a batch: everything leaves as (numerator, denominator) pairs. Invariant:
`PolicyLoss` summed over parts of a batch, each with the global denominators, is the loss of the
whole batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.objectives import aggregation, corrections, kl, trust_region
from rlax_stack.objectives.aggregation import Mean


class LossInputs(NamedTuple):
  """One value per token, all of one shape; what is masked may hold anything, NaN included.

  `weight_t` (float32) is from `aggregation.token_weights` over the whole batch; `entropy_t` may
  carry a gradient.
  """

  log_probs_t: jax.Array
  entropy_t: jax.Array
  proximal_log_probs_t: jax.Array
  behaviour_log_probs_t: jax.Array
  anchor_log_probs_t: jax.Array
  adv_t: jax.Array
  mask_t: jax.Array
  weight_t: jax.Array


class Denominators(NamedTuple):
  """Global denominators, float32 scalars: Σ weight_t for the policy term.

  Trained tokens for the others.
  """

  policy: jax.Array
  tokens: jax.Array


class PolicyLoss(NamedTuple):
  """`loss` is this part's share of the batch loss (float32 scalar); `metrics` are pairs.

  `ratio_max` a maximum.
  """

  loss: jax.Array
  metrics: dict[str, Mean]
  ratio_max: jax.Array


def policy_loss(
  inputs: LossInputs,
  denominators: Denominators,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  correction_cap: float | None = None,
  kl_coef: float = 0.0,
  kl_estimator: str = 'k3_plus',
  entropy_coef: float = 0.0,
) -> PolicyLoss:
  """Decoupled clipped policy loss with optional KL and entropy terms.

  L = Σ aₜ wₜ max(−ρₜÂₜ, −clip(ρₜ)Âₜ) / Σa  +  β Σ KLₜ / N  −  c Σ Hₜ / N
  with ρₜ against the proximal policy, wₜ the truncated weight proximal / behaviour (1 without a
  cap) and aₜ the aggregation weight.

  Divided by: the global denominators given, each term by its own.
  Gradient flows through: log_probs_t and, with entropy_coef, entropy_t.
  See "AReaL", Fu et al. (https://arxiv.org/abs/2505.24298), "DAPO", Yu et al.
  (https://arxiv.org/abs/2503.14476).

  Args:
    inputs: see LossInputs.
    denominators: of the whole batch, not of this part.
    clip_low: see `trust_region.ppo_clip`.
    clip_high: see `trust_region.ppo_clip`.
    correction_cap: C of the token weights, or None for no correction.
    kl_coef: β; with 0 the anchor log-probs are not read.
    kl_estimator: see `kl.kl_estimate`.
    entropy_coef: c.

  Returns: PolicyLoss.
  """
  mask = inputs.mask_t
  clipped = trust_region.ppo_clip(
    inputs.log_probs_t,
    inputs.proximal_log_probs_t,
    inputs.adv_t,
    mask,
    clip_low=clip_low,
    clip_high=clip_high,
  )
  correction = corrections.token_truncated_importance(
    inputs.proximal_log_probs_t,
    inputs.behaviour_log_probs_t,
    mask,
    cap=jnp.inf if correction_cap is None else correction_cap,
  )
  loss_t = clipped.loss_t if correction_cap is None else clipped.loss_t * correction.weight_t
  loss = aggregation.weighted_mean(loss_t, inputs.weight_t).numerator / denominators.policy
  entropy = aggregation.masked_mean(inputs.entropy_t, mask)
  metrics = {'entropy': jax.tree.map(jax.lax.stop_gradient, entropy)}
  if entropy_coef:
    loss -= entropy_coef * entropy.numerator / denominators.tokens
  if kl_coef:
    kl_t = kl.kl_estimate(
      inputs.log_probs_t, inputs.anchor_log_probs_t, mask, estimator=kl_estimator
    )
    divergence = aggregation.masked_mean(kl_t, mask)
    loss += kl_coef * divergence.numerator / denominators.tokens
    metrics['kl_anchor'] = divergence
  metrics |= _ratio_metrics(inputs, clipped, correction)
  held = jax.tree.map(jax.lax.stop_gradient, metrics)
  ratio_max = jnp.max(jnp.where(mask, jax.lax.stop_gradient(clipped.ratio_t), 0.0))
  return PolicyLoss(loss, held, ratio_max)


def _ratio_metrics(
  inputs: LossInputs, clipped: trust_region.ClipOutput, correction: corrections.Correction
) -> dict[str, Mean]:
  """How far the current policy is from the proximal one, and the proximal from the behaviour."""
  mask = inputs.mask_t
  mean = aggregation.masked_mean
  drift = trust_region.log_ratio(inputs.log_probs_t, inputs.behaviour_log_probs_t, mask)
  return {
    'ratio_mean': mean(clipped.ratio_t, mask),
    'clip_low_fraction': mean(clipped.clipped_low_t, mask),
    'clip_high_fraction': mean(clipped.clipped_high_t, mask),
    # k3 of the sampled tokens estimates KL(behaviour ‖ current), which asynchrony and numerics
    # open.
    'kl_behaviour': mean(jnp.expm1(drift) - drift, mask),
    'behaviour_log_prob_gap': mean(jnp.abs(drift), mask),
    'correction_mean': mean(correction.weight_t, mask),
    'truncated_fraction': mean(correction.truncated_t, mask),
  }
