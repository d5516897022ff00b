"""Policy ratios in log space: of a token, a sequence or a turn, against proximal or behaviour.

Not for bounds (trust_regions/). Invariant: with equal log-probs the log-ratio is exactly 0; masked
tokens have log-ratio exactly 0.
"""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.objectives import segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs

Base = Literal['proximal', 'behaviour', 'log_linear', 'ema']

# exp of it is finite in float32 and so are its products; beyond it the gradient is 0.
MAX_LOG_RATIO = 20.0


class Ratio(NamedTuple):
  """What a ratio box gives.

  `log_token_t` is log πₜ − log π_base,ₜ of every token; `pool` turns values per token into the
  ratio's values, spread over the tokens they belong to; `log_ratio_t` is the pooled `log_token_t`.
  """

  log_token_t: jax.Array
  log_ratio_t: jax.Array
  pool: Callable[[jax.Array], jax.Array]

  @property
  def ratio_t(self) -> jax.Array:
    """ρ, float32."""
    return exp(self.log_ratio_t)


def exp(log_ratio_t: jax.Array) -> jax.Array:
  """e to the log-ratio, held within e^±MAX_LOG_RATIO."""
  return jnp.exp(jnp.clip(log_ratio_t, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def log_ratio(log_probs_t: jax.Array, base_log_probs_t: jax.Array, mask_t: jax.Array) -> jax.Array:
  """log π − log π_base in float32, exactly 0 outside `mask_t`.

  The mask is applied before any `exp`: a masked infinity or NaN would leak through the gradient of
  an `exp` that is masked afterwards. No gradient flows into the base.
  """
  base = jax.lax.stop_gradient(base_log_probs_t).astype(jnp.float32)
  return jnp.where(mask_t, log_probs_t.astype(jnp.float32) - base, 0.0)


def token(inputs: LossInputs, *, base: Base = 'proximal') -> Ratio:
  """Ratio of every token.

  ρₜ = πₜ / π_base,ₜ

  Divided by: nothing. Gradient flows through: log_probs_t.
  See "Proximal Policy Optimization", Schulman et al. (https://arxiv.org/abs/1707.06347); against
  behaviour it is the importance ratio itself.

  Args:
    inputs: [rows, N].
    base: 'proximal', 'behaviour', or a proximal policy of its own: 'log_linear' lies between
      behaviour and current (see `interpolated`), 'ema' is averaged weights (see `ema_decay`).
    decay: of the averaged weights at each update; read with base 'ema' only.
  """
  log_token = _log_token(inputs, base)
  return Ratio(log_token, log_token, lambda value_t: value_t)


def sequence(inputs: LossInputs, *, base: Base = 'proximal') -> Ratio:
  """Geometric mean over a sequence as the ratio of each of its tokens, in the form GSPO-token.

  ρₜ = sg[sᵢ] πₜ / sg[πₜ],  sᵢ = (Π πₜ / π_base,ₜ)^(1/nᵢ)

  Divided by: nᵢ inside the mean. Gradient flows through: log_probs_t of the own token only; summed
  over a sequence with equal advantages it is nᵢ times that of sᵢ.
  See "Group Sequence Policy Optimization", Zheng et al. (https://arxiv.org/abs/2507.18071).

  Args:
    inputs: [rows, N].
    base: see `token`.
    decay: see `token`.
  """

  def pool(value_t):
    mean = segments.run_mean(value_t, inputs.mask_t, inputs.trajectory_t)
    return jax.lax.stop_gradient(mean - value_t) + value_t

  log_token = _log_token(inputs, base)
  return Ratio(log_token, pool(log_token), pool)


def geometric_mean(inputs: LossInputs, *, base: Base = 'proximal') -> Ratio:
  """Geometric mean over a sequence, spread over its tokens, with its own gradient.

  ρₜ = (Π πₜ / π_base,ₜ)^(1/nᵢ)

  Divided by: nᵢ inside the mean. Gradient flows through: log_probs_t, 1/nᵢ to each token.
  See "Geometric-Mean Policy Optimization", Zhao et al. (https://arxiv.org/abs/2507.20673), which
  bounds every factor before the mean (trust region `log_clip`).

  Args:
    inputs: [rows, N].
    base: see `token`.
    decay: see `token`.
  """

  def pool(value_t):
    return segments.run_mean(value_t, inputs.mask_t, inputs.trajectory_t)

  log_token = _log_token(inputs, base)
  return Ratio(log_token, pool(log_token), pool)


def turn(inputs: LossInputs, *, base: Base = 'proximal') -> Ratio:
  """`sequence` over one turn instead of the whole trajectory: one ratio per uninterrupted answer.

  ρₜ = sg[s] πₜ / sg[πₜ],  s = (Π πₜ / π_base,ₜ)^(1/n) over the tokens of the turn

  Divided by: the tokens of the turn inside the mean. Gradient flows through: log_probs_t of the own
  token only.
  See "Stabilizing Off-Policy Training for Long-Horizon LLM Agent", Li et al.
  (https://arxiv.org/abs/2511.20718), turn-level importance sampling, here in the form GSPO-token.

  Args:
    inputs: [rows, N].
    base: see `token`.
    decay: see `token`.
  """

  def pool(value_t):
    mean = segments.run_mean(value_t, inputs.mask_t, inputs.trajectory_t, inputs.turn_t)
    return jax.lax.stop_gradient(mean - value_t) + value_t

  log_token = _log_token(inputs, base)
  return Ratio(log_token, pool(log_token), pool)


def interpolated(inputs: LossInputs, *, base: Base = 'proximal') -> jax.Array:
  """Proximal log-probs; with base 'log_linear' those of one version ago, without a forward pass.

  log π_proximal,ₜ = log π_behaviour,ₜ + α (log πₜ − log π_behaviour,ₜ),  α = max(d − 1, 0) / d

  d is the token's staleness in versions; at d ≤ 1 the proximal policy is the behaviour policy.
  Divided by: nothing. Gradient flows through: nothing (π is held).
  See the approximation of the proximal policy in AReaL (https://github.com/inclusionAI/AReaL,
  docs/en/algorithms/prox_approx.md), which runs one version behind the current weights.

  Args:
    inputs: [rows, N].
    base: see `token`; the others leave the proximal policy as it is.
  """
  if base != 'log_linear':
    return inputs.proximal_log_probs_t
  gap = jnp.maximum(inputs.staleness_t, 1).astype(jnp.float32)
  current, behaviour = jax.lax.stop_gradient(inputs.log_probs_t), inputs.behaviour_log_probs_t
  return behaviour + (gap - 1.0) / gap * (current - behaviour)


def ema_decay(
  *, base: Base = 'proximal', decay: Annotated[float, Range(0.0, 1.0)] = 0.889
) -> float | None:
  """How much of the averaged weights one update keeps; None where the base is not 'ema'.

  θ̄ = Σₖ βᵏ θ₋ₖ / Σₖ βᵏ,  θ₋ₖ the weights k updates ago, as far back as those of the start

  The learner scores the proximal log-probs under θ̄ before every update, so that the trust region
  bounds how fast the policy moves, however many updates a batch gets and however stale it is. That
  costs a second copy of the weights, and a forward pass for every update.
  See "Batch size-invariance for policy optimization", Hilton et al.
  (https://arxiv.org/abs/2110.00641), PPO-EWMA. The default, a memory of nine updates, is ours.

  Args:
    base: see `token`.
    decay: β; 0 makes the current weights the proximal ones.
  """
  return decay if base == 'ema' else None


def _log_token(inputs: LossInputs, base: Base) -> jax.Array:
  behaviour = base == 'behaviour'
  log_probs = inputs.behaviour_log_probs_t if behaviour else inputs.proximal_log_probs_t
  return log_ratio(inputs.log_probs_t, log_probs, inputs.mask_t)


_POOLED = frozenset({'pooled'})


def _entry(function: Callable[..., Ratio], formula: str, tags: frozenset[str] = _POOLED) -> Box:
  return Box(function, formula=formula, tags=tags, proximal=interpolated, average=ema_decay)


TABLE = {
  'token': _entry(token, 'ρ = π/π_{base}', frozenset()),
  'sequence': _entry(sequence, 'ρ = (Π π/π_{base})^(1/n)'),
  'geometric_mean': _entry(geometric_mean, 'ρ = (Π π/π_{base})^(1/n)'),
  'turn': _entry(turn, 'ρ = (Π_turn π/π_{base})^(1/n)'),
}
