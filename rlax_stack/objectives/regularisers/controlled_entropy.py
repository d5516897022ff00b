"""Entropy held at a level: a coefficient that is steered, and an anchor it is pulled to.

Not for a constant bonus (`entropy_bonus`). Invariant: what is steered by or anchored to lives in
the state of the box, so it is in checkpoints and moves only with finite updates.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from rlax_stack.objectives import segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Penalty, Statistics

_Positive = Annotated[float, Range(0.0)]
_Fraction = Annotated[float, Range(0.0, 1.0)]


def adaptive_entropy(inputs: LossInputs, *, state: dict[str, jax.Array]) -> Penalty:
  """Entropy bonus whose coefficient rises while the entropy is below a target, and falls above it.

  Lₜ = −c 1[H̄ < H*] Hₜ;  after each update c = clip(c + δ sgn(H* − H̄), a, b), H̄ its mean entropy

  Divided by: the trained tokens of the batch. Gradient flows through: entropy_t.
  See "Skywork-OR1", He et al. (https://arxiv.org/abs/2505.22312) and its published scripts, whose
  values are the defaults. H̄ is here that of the update before.

  Args:
    inputs: [rows, N].
    state: from `start_coefficient`.
    target: H*, nats per token.
    step: δ.
    start: c of the first update.
    absolute_low: a.
    absolute_high: b.
  """
  return Penalty(-(state['coef'] * state['on']) * inputs.entropy_t)


def start_coefficient(*, start: _Positive = 0.0) -> dict[str, jax.Array]:
  """State of `adaptive_entropy`: its coefficient, and 1 while it is in use."""
  return {'coef': jnp.float32(start), 'on': jnp.float32(1.0)}


def steer_coefficient(
  state: dict[str, jax.Array],
  metrics: dict[str, Any],
  *,
  target: _Positive = 0.2,
  step: _Positive = 1e-4,
  absolute_low: float = 0.0,
  absolute_high: float = 5e-3,
) -> dict[str, jax.Array]:
  """One step of the coefficient of `adaptive_entropy` towards the target."""
  below = metrics['entropy'] < target
  coef = state['coef'] + jnp.where(below, step, -step)
  return {
    'coef': jnp.clip(coef, absolute_low, absolute_high),
    'on': below.astype(jnp.float32),
  }


def peak_entropy(
  inputs: LossInputs,
  *,
  statistics: Statistics,
  vocabulary: dict[str, jax.Array],
  coef: _Positive = 0.005,
) -> Penalty:
  """Pulls the entropy of each sequence's most uncertain tokens to where it was at the start (SIREN).

  L = c (H̄ − H̄₀)²,  H̄ = (1/B) Σᵢ (1/|Pᵢ|) Σ_{t ∈ Pᵢ} Hₜ,  Pᵢ the tokens above the q-quantile of yᵢ
  Hₜ = −Σ_{v ∈ Vₜ} π̂ₜ(v) log π̂ₜ(v),  π̂ₜ(v) = πₜ(v) / Σ_{u ∈ Vₜ} πₜ(u),  Vₜ the most likely words, as many
  as have less than p of the probability together, one at least

  Divided by: |Pᵢ| and the B sequences that have peaks. Gradient flows through: Hₜ, linearised at H̄ of
  the whole batch; Vₜ, Pᵢ and H̄₀ are held.
  See "Rethinking Entropy Regularization in Large Reasoning Models", Jiang et al.
  (https://arxiv.org/abs/2509.25133). Values of its script, and Vₜ as its code
  (https://github.com/Linn3a/siren) has it, but for a bound of 10,000 words.

  Args:
    inputs: [rows, N].
    statistics: from `peaks`.
    vocabulary: from `nucleus_entropy`.
    coef: c.
    quantile: q.
    top_p: p; 1 takes the entropy of the whole vocabulary.
  """
  distance, weight = statistics.scalars['distance'], statistics.tokens['weight_t']
  entropy = vocabulary.get('entropy', inputs.entropy_t)
  moved = entropy - jax.lax.stop_gradient(entropy)
  loss_t = coef * weight * (2.0 * distance * moved + distance * distance)
  # One number at every token, so that the average over trained tokens is that number.
  mean_t = jnp.broadcast_to(statistics.scalars['mean'], weight.shape)
  return Penalty(loss_t, jnp.float32(1.0), {'peak_entropy': mean_t})


def nucleus_entropy(
  log_policy: jax.Array, target: jax.Array, *, top_p: _Fraction = 0.8
) -> dict[str, jax.Array]:
  """Entropy of each distribution within its nucleus; see `peak_entropy`.

  Args:
    log_policy: [n, V].
    target: not read.
    top_p: p.

  Returns: 'entropy' [n]; nothing where p is 1, since that is `entropy_t`.
  """
  del target
  if top_p >= 1.0:
    return {}
  ranked = -jnp.sort(-log_policy, axis=-1)
  probability = jnp.exp(ranked)
  kept = jax.lax.stop_gradient(jnp.cumsum(probability, axis=-1) < top_p).at[:, 0].set(True)
  inside = jnp.where(kept, probability, 0.0)
  total = jnp.sum(inside, axis=-1)
  return {'entropy': jnp.log(total) - jnp.sum(inside * ranked, axis=-1) / total}


def peaks(
  inputs: LossInputs,
  *,
  state: dict[str, jax.Array],
  vocabulary: dict[str, jax.Array],
  quantile: _Fraction = 0.8,
) -> Statistics:
  """The peaks of every sequence of the whole batch and how far their mean is from the anchor."""
  mask, ids = inputs.mask_t, inputs.trajectory_t
  entropy = vocabulary.get('entropy', inputs.entropy_t)
  rank = _rank(entropy, mask, ids)
  peak = mask & (rank > quantile * (segments.run_size(mask, ids) - 1.0))
  size = segments.run_sum(peak.astype(jnp.float32), mask, ids)
  starts = segments.run_start(mask, ids) & (size > 0.0)
  count = jnp.maximum(jnp.sum(starts.astype(jnp.float32)), 1.0)
  weight = jnp.where(peak, 1.0 / (jnp.maximum(size, 1.0) * count), 0.0)
  mean = jnp.sum(weight * entropy)
  distance = jnp.where(state['set'] > 0.0, mean - state['anchor'], 0.0)
  return Statistics({'weight_t': weight}, {'mean': mean, 'distance': distance})


def no_anchor() -> dict[str, jax.Array]:
  """State of `peak_entropy` before the first update: `set` says whether there is an anchor."""
  return {'anchor': jnp.float32(0.0), 'set': jnp.float32(0.0)}


def keep_anchor(state: dict[str, jax.Array], metrics: dict[str, Any]) -> dict[str, jax.Array]:
  """The mean of the peaks at the first update is the anchor for ever."""
  anchor = jnp.where(state['set'] > 0.0, state['anchor'], metrics['peak_entropy'])
  return {'anchor': anchor, 'set': jnp.ones_like(state['set'])}


def _rank(value_t: jax.Array, mask_t: jax.Array, ids: jax.Array) -> jax.Array:
  """How many trained tokens of the same id have a smaller value, float32."""
  last = jnp.iinfo(jnp.int32).max
  keys = jnp.where(mask_t, ids, last).reshape(-1)
  order = jnp.lexsort((value_t.reshape(-1), keys))
  places = jnp.arange(keys.size, dtype=jnp.int32)
  keys, values = keys[order], value_t.reshape(-1)[order]
  new_id = jnp.concatenate([jnp.ones(1, bool), keys[1:] != keys[:-1]])
  new_value = new_id | jnp.concatenate([jnp.ones(1, bool), values[1:] != values[:-1]])
  first_of_id = jax.lax.cummax(jnp.where(new_id, places, 0))
  first_of_value = jax.lax.cummax(jnp.where(new_value, places, 0))
  rank = (first_of_value - first_of_id).astype(jnp.float32)
  return jnp.zeros(keys.size, jnp.float32).at[order].set(rank).reshape(value_t.shape)


_TAGS = frozenset({'entropy_gradient'})

TABLE = {
  'adaptive_entropy': Box(
    adaptive_entropy,
    formula='− c·H, c to hold H at {target:g}',
    tags=_TAGS,
    init_state=start_coefficient,
    update_state=steer_coefficient,
  ),
  'peak_entropy': Box(
    peak_entropy,
    formula='+ {coef:g}·(H_peaks − H_peaks at the start)², H of the top {top_p:g}',
    tags=_TAGS,
    vocabulary=nucleus_entropy,
    batch_statistics=peaks,
    init_state=no_anchor,
    update_state=keep_anchor,
  ),
}
