"""Advantages from a critic's values, and the targets that the critic is trained to.

Both are made on the device from the values at the start of the batch, which are held. Not for the
critic or its loss (critics/). Invariant: where a trajectory was cut off it goes on with the value of
the state after its last token; where it ended that value is 0. The rewards of steps and turns fall
due where these end, what they leave of a trajectory's reward at its end.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios, segments, traces
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs
from rlax_stack.objectives.reward_batch import RewardBatch, TokenValues

_Fraction = Annotated[float, Range(0.0, 1.0)]
_Positive = Annotated[float, Range(0.0)]
_Eps = Annotated[float, Range(1e-12)]
_Ddof = Annotated[int, Range(0, 1)]


def gae(batch: RewardBatch) -> TokenValues:
  """Generalised advantage estimation over trained tokens, with a λ of its own for the targets.

  Âₜ = Σₖ (γλ)ᵏ δₜ₊ₖ,  δₜ = rₜ + γ V(s_{t⁺}) − V(sₜ),  V̂ₜ = V(sₜ) + Σₖ (γλ_V)ᵏ δₜ₊ₖ

  t⁺ the next trained token of the trajectory; with `whiten` Âₜ ← (Âₜ − μ) / √(s² + ε) over the
  trained tokens of the batch, after the targets. Divided by: √(s² + ε) with `whiten`. Gradient flows
  through: nothing.
  See "High-Dimensional Continuous Control Using Generalized Advantage Estimation", Schulman et al.
  (https://arxiv.org/abs/1506.02438); two λ from "What's Behind PPO's Collapse in Long-CoT?", Yuan et
  al. (https://arxiv.org/abs/2503.01491).

  Args:
    batch: any groups.
    gamma: γ, per trained token.
    lam: λ of the advantage.
    value_lam: λ_V of the targets; 1 makes them returns.
    whiten: whether to standardise over the batch.
    ddof: 1 for the sample's variance, 0 for the population's.
    eps: ε, added to the variance.

  Returns: the reward due at each trained token, of which the device makes advantages.
  """
  return batch.token_reward_t


def gae_advantages(
  inputs: LossInputs,
  *,
  gamma: _Fraction = 1.0,
  lam: _Fraction = 0.95,
  whiten: bool = False,
  ddof: _Ddof = 1,
  eps: _Eps = 1e-8,
) -> jax.Array:
  """Advantages of `gae`, float32 [M, rows, N]."""
  adv_t = _gae(inputs, gamma, lam)
  return whitened(adv_t, inputs.mask_t, ddof=ddof, eps=eps) if whiten else adv_t


def gae_targets(
  inputs: LossInputs, *, gamma: _Fraction = 1.0, value_lam: _Fraction = 1.0
) -> jax.Array:
  """Value targets of `gae`, float32 [M, rows, N]."""
  return inputs.value_t + _gae(inputs, gamma, value_lam)


def length_adaptive_gae(batch: RewardBatch) -> TokenValues:
  """`gae` whose λ grows with the length of the answer, and targets that are returns (VAPO).

  λᵢ = max(1 − 1/(α nᵢ), 0),  Âₜ = Σₖ (γλᵢ)ᵏ δₜ₊ₖ,  V̂ₜ = V(sₜ) + Σₖ γᵏ δₜ₊ₖ

  nᵢ the trained tokens of the trajectory: the weights of its temporal differences add up to about
  α nᵢ. Divided by: √(s² + ε) with `whiten`. Gradient flows through: nothing.
  See "VAPO", Yue et al. (https://arxiv.org/abs/2504.05118), α = 0.05.

  Args:
    batch: any groups.
    alpha: α.
    gamma: γ, per trained token.
    whiten: see `gae`.
    ddof: see `gae`.
    eps: see `gae`.

  Returns: the reward due at each trained token, of which the device makes advantages.
  """
  return batch.token_reward_t


def length_adaptive_advantages(
  inputs: LossInputs,
  *,
  alpha: Annotated[float, Range(1e-6)] = 0.05,
  gamma: _Fraction = 1.0,
  whiten: bool = False,
  ddof: _Ddof = 1,
  eps: _Eps = 1e-8,
) -> jax.Array:
  """Advantages of `length_adaptive_gae`, float32 [M, rows, N]."""
  size = segments.run_size(inputs.mask_t, inputs.trajectory_t)
  lam = jnp.maximum(1.0 - 1.0 / (alpha * jnp.maximum(size, 1.0)), 0.0)
  adv_t = _gae(inputs, gamma, lam)
  return whitened(adv_t, inputs.mask_t, ddof=ddof, eps=eps) if whiten else adv_t


def return_targets(inputs: LossInputs, *, gamma: _Fraction = 1.0) -> jax.Array:
  """Value targets of `length_adaptive_gae`, float32 [M, rows, N]: returns."""
  return inputs.value_t + _gae(inputs, gamma, 1.0)


def vtrace(batch: RewardBatch) -> TokenValues:
  """V-trace: targets of the proximal policy from samples of another, with bounded traces (IMPALA).

  v̂ₜ = V(sₜ) + Σₖ γᵏ (Πⱼ₌ₜ..ₜ₊ₖ₋₁ cⱼ) ρₜ₊ₖ δₜ₊ₖ,  Âₜ = rₜ + γ (λ v̂_{t⁺} + (1−λ) V(s_{t⁺})) − V(sₜ)
  ρₜ = min(ρ̄, wₜ),  cₜ = λ min(c̄, wₜ),  wₜ = π_proximal,ₜ / π_behaviour,ₜ

  After the last token v̂ is V of the state there. With wₜ = 1 it is `gae` of λ, targets and all.
  IMPALA's policy gradient weighs Âₜ by ρₜ: that is the correction `token_tis(absolute_high=ρ̄)`.
  Divided by: √(s² + ε) with `whiten`. Gradient flows through: nothing.
  See "IMPALA", Espeholt et al. (https://arxiv.org/abs/1802.01561); λ in the advantage as in rlax
  (https://github.com/google-deepmind/rlax).

  Args:
    batch: any groups.
    gamma: γ, per trained token.
    lam: λ.
    absolute_rho_high: ρ̄, decides which policy the targets are of.
    absolute_c_high: c̄, decides how far differences travel back.
    whiten: see `gae`.
    ddof: see `gae`.
    eps: see `gae`.

  Returns: the reward due at each trained token, of which the device makes advantages.
  """
  return batch.token_reward_t


def vtrace_advantages(
  inputs: LossInputs,
  *,
  gamma: _Fraction = 1.0,
  lam: _Fraction = 1.0,
  absolute_rho_high: _Positive = 1.0,
  absolute_c_high: _Positive = 1.0,
  whiten: bool = False,
  ddof: _Ddof = 1,
  eps: _Eps = 1e-8,
) -> jax.Array:
  """Advantages of `vtrace`, float32 [M, rows, N]."""
  weighted, decay = _vtrace_parts(inputs, gamma, lam, absolute_rho_high, absolute_c_high)
  correction = traces.sum_to_go(weighted, decay, inputs.mask_t, inputs.trajectory_t)
  # v̂ − V of the next trained token of the trajectory: a sum to go without its own term.
  beyond = traces.next_of(correction, inputs.mask_t, inputs.trajectory_t)
  adv_t = traces.td_errors(inputs, gamma) + gamma * lam * beyond
  return whitened(adv_t, inputs.mask_t, ddof=ddof, eps=eps) if whiten else adv_t


def vtrace_targets(
  inputs: LossInputs,
  *,
  gamma: _Fraction = 1.0,
  lam: _Fraction = 1.0,
  absolute_rho_high: _Positive = 1.0,
  absolute_c_high: _Positive = 1.0,
) -> jax.Array:
  """Value targets of `vtrace`, float32 [M, rows, N]."""
  weighted, decay = _vtrace_parts(inputs, gamma, lam, absolute_rho_high, absolute_c_high)
  return inputs.value_t + traces.sum_to_go(weighted, decay, inputs.mask_t, inputs.trajectory_t)


def whitened(value_t: jax.Array, mask_t: jax.Array, *, ddof: int, eps: float) -> jax.Array:
  """(x − μ) / √(s² + ε) over the trained tokens of the batch, 0 where masked."""
  value = jnp.where(mask_t, value_t, 0.0)
  count = jnp.sum(mask_t.astype(jnp.float32))
  centred = jnp.where(mask_t, value - jnp.sum(value) / jnp.maximum(count, 1.0), 0.0)
  variance = jnp.sum(centred * centred) / jnp.maximum(count - ddof, 1.0)
  return centred * jax.lax.rsqrt(variance + eps)


def _gae(inputs: LossInputs, gamma: float, lam: jax.Array | float) -> jax.Array:
  decay = jnp.broadcast_to(jnp.asarray(gamma * lam, jnp.float32), inputs.mask_t.shape)
  errors = traces.td_errors(inputs, gamma)
  return traces.sum_to_go(errors, decay, inputs.mask_t, inputs.trajectory_t)


def _vtrace_parts(
  inputs: LossInputs, gamma: float, lam: float, rho_high: float, c_high: float
) -> tuple[jax.Array, jax.Array]:
  """ρδ and γc of every token."""
  weight = ratios.exp(
    ratios.log_ratio(inputs.proximal_log_probs_t, inputs.behaviour_log_probs_t, inputs.mask_t)
  )
  weighted = jnp.minimum(weight, rho_high) * traces.td_errors(inputs, gamma)
  return weighted, gamma * lam * jnp.minimum(weight, c_high)


_UNSCORED = frozenset({'critic', 'unscored'})

TABLE = {
  'gae': Box(
    gae,
    formula='A = GAE(γ={gamma:g}, λ={lam:g}), V̂ = V + GAE(λ={value_lam:g})',
    tags=_UNSCORED,
    token_advantages=gae_advantages,
    value_targets=gae_targets,
  ),
  'length_adaptive_gae': Box(
    length_adaptive_gae,
    formula='A = GAE(γ={gamma:g}, λ=1−1/({alpha:g}·n)), V̂ = V + GAE(λ=1)',
    tags=_UNSCORED,
    token_advantages=length_adaptive_advantages,
    value_targets=return_targets,
  ),
  'vtrace': Box(
    vtrace,
    formula='A, V̂ = V-trace(γ={gamma:g}, λ={lam:g}, ρ ≤ {absolute_rho_high:g}, c ≤ {absolute_c_high:g})',
    tags=frozenset({'critic', 'behaviour'}),
    token_advantages=vtrace_advantages,
    value_targets=vtrace_targets,
  ),
}
