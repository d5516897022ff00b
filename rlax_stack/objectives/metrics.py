"""What is measured beside the loss, in forms that add up over micro-batches and devices.

Not for the loss itself. Invariant: means are pairs, maxima are 0 or more, quantiles come from
counts; `finished` makes scalars of them once, at the end of a step.
"""

import math

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios
from rlax_stack.objectives.aggregation import masked_mean
from rlax_stack.objectives.inputs import Correction, LossInputs, LossParts, TokenLoss
from rlax_stack.objectives.ratios import Ratio, log_ratio

# Bins of a log-ratio, dense at 0: their width grows from 1e-4 to 8 % of the log-ratio.
_BINS = 257
_SCALE = 1e-3
_REACH = math.asinh(ratios.MAX_LOG_RATIO / _SCALE)
QUANTILES = {'ratio_p01': 0.01, 'ratio_p50': 0.5, 'ratio_p99': 0.99}


def loss_metrics(
  inputs: LossInputs, ratio: Ratio, trust: TokenLoss, correction: Correction
) -> LossParts:
  """Metrics of one micro-batch; `loss` is 0.

  kl_behaviour = E[ρ − 1 − log ρ] estimates KL(behaviour ‖ current), kl_behaviour_reverse =
  E[ρ log ρ − ρ + 1] KL(current ‖ behaviour), both of the sampled tokens, ρ = current / behaviour.

  sampler_kl = E[w − 1 − log w] and sampler_log_ratio_max = max |log w|, w = proximal / behaviour, take only tokens that
  the learner's version drew: they show what the sampler computes otherwise than the learner (quantised weights or KV,
  other kernels) and not that it lags. Both are 0 where the batch has no such token.
  """
  mask = inputs.mask_t
  drift = log_ratio(inputs.log_probs_t, inputs.behaviour_log_probs_t, mask)
  log_weight = log_ratio(inputs.proximal_log_probs_t, inputs.behaviour_log_probs_t, mask)
  weight = ratios.exp(log_weight)
  same_version = mask & (inputs.staleness_t == 0)
  moved = ratios.exp(drift) - 1.0
  values = {
    'entropy': inputs.entropy_t,
    'ratio_mean': ratio.ratio_t,
    'clip_low_fraction': trust.clipped_low_t,
    'clip_high_fraction': trust.clipped_high_t,
    'kl_behaviour': moved - drift,
    'kl_behaviour_reverse': (moved + 1.0) * drift - moved,
    'behaviour_log_prob_gap': jnp.abs(drift),
    'correction_mean': correction.weight_t,
    'truncated_fraction': correction.truncated_t,
    'kept_fraction': correction.kept_t,
    'importance_weight': weight,
    'importance_weight_squared': weight * weight,
  }
  return LossParts(
    loss=jnp.float32(0.0),
    means={name: masked_mean(value, mask) for name, value in values.items()}
    | {'sampler_kl': masked_mean(weight - 1.0 - log_weight, same_version)},
    maxima={
      'ratio_max': jnp.max(jnp.where(mask, ratio.ratio_t, 0.0)),
      'sampler_log_ratio_max': jnp.max(jnp.where(same_version, jnp.abs(log_weight), 0.0)),
    },
    histograms={'ratio': log_ratio_counts(ratio.log_ratio_t, mask)},
  )


def finished(parts: LossParts) -> dict[str, jax.Array]:
  """Float32 scalars of a whole step: means, maxima, quantiles, effective sample size.

  ess_fraction = E[w]² / E[w²] with w = proximal / behaviour, the share of the tokens that counts.
  """
  means = dict(parts.means)
  sampler = means.pop('sampler_kl')
  scalars = {name: pair.numerator / pair.denominator for name, pair in means.items()}
  # A batch may hold stale tokens only.
  scalars['sampler_kl'] = sampler.numerator / jnp.maximum(sampler.denominator, 1.0)
  first, second = scalars.pop('importance_weight'), scalars.pop('importance_weight_squared')
  scalars['ess_fraction'] = first * first / second
  counts = parts.histograms['ratio']
  quantiles = {name: ratio_quantile(counts, level) for name, level in QUANTILES.items()}
  return scalars | parts.maxima | quantiles


def log_ratio_counts(log_ratio_t: jax.Array, mask_t: jax.Array) -> jax.Array:
  """Counts of log-ratios in fixed bins, float32; equal arguments in other parts just add up."""
  place = jnp.arcsinh(log_ratio_t / _SCALE) / _REACH
  index = jnp.round((jnp.clip(place, -1.0, 1.0) + 1.0) * (0.5 * (_BINS - 1))).astype(jnp.int32)
  counts = jnp.zeros(_BINS, jnp.float32)
  return counts.at[index.reshape(-1)].add(mask_t.astype(jnp.float32).reshape(-1))


def ratio_quantile(counts: jax.Array, level: float) -> jax.Array:
  """The ratio below which the share `level` of the counted tokens lies, to 8 % of its logarithm."""
  cumulative = jnp.cumsum(counts)
  index = jnp.argmax(cumulative >= level * cumulative[-1])
  place = index.astype(jnp.float32) * (2.0 / (_BINS - 1)) - 1.0
  return jnp.exp(_SCALE * jnp.sinh(place * _REACH))
