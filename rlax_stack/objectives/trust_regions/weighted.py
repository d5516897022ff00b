"""Policy gradients −w A log π whose weight w is a shaped ratio, held constant.

Not for surrogates whose gradient flows through the ratio. Invariant: at ratio 1 the gradient is
that of REINFORCE; the ratio's base should be behaviour, as these weights are the only correction.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios, segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, TokenLoss
from rlax_stack.objectives.ratios import Ratio

Level = Literal['sequence', 'token']


def topr(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  level: Level = 'sequence',
  absolute_high: Annotated[float, Range(0.0)] = 1.0,
) -> TokenLoss:
  """Good answers as in supervised training, bad ones with a truncated importance weight.

  Lₜ = −sg[wₜ] Âₜ log πₜ,  wₜ = 1 where Âₜ ≥ 0, else min(ρ, C),  ρ = Π_s π_s / π_base,s

  Divided by: the aggregation's denominator. Gradient flows through: log_probs_t, never the ratio.
  See "Tapered Off-Policy REINFORCE", Le Roux et al. (https://arxiv.org/abs/2503.14286).

  Args:
    ratio: its base is the policy that sampled.
    inputs: [rows, N].
    level: 'sequence' takes the ratio of the whole answer, as the paper; 'token' that of each token.
    absolute_high: C.
  """
  log_ratio = ratio.log_token_t
  if level == 'sequence':
    log_ratio = segments.run_sum(log_ratio, inputs.mask_t, inputs.trajectory_t)
  rho = ratios.exp(jax.lax.stop_gradient(log_ratio))
  negative = inputs.mask_t & (inputs.adv_t < 0)
  weight = jnp.where(negative, jnp.minimum(rho, absolute_high), 1.0)
  nowhere = jnp.zeros_like(inputs.mask_t)
  loss = -weight * inputs.adv_t * inputs.log_probs_t
  return TokenLoss(loss, nowhere, negative & (rho > absolute_high))


def double_sided(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  delta_low: Annotated[float, Range(0.0, 1.0)] = 0.8,
  delta_high: Annotated[float, Range(0.0)] = 3.0,
) -> TokenLoss:
  """Importance weight inside an open interval, nothing outside of it, whatever the advantage's sign.

  Lₜ = −sg[f(ρₜ)] Âₜ log πₜ,  f(ρ) = ρ where 1−δ_lo < ρ < 1+δ_hi, else 0

  Divided by: the aggregation's denominator; dropped tokens stay in it. Gradient flows through:
  log_probs_t, never the ratio.
  See "GLM-5: from Vibe Coding to Agentic Engineering" (https://arxiv.org/abs/2602.15763), section
  4.1.2, and "Single-Rollout Asynchronous Optimization", Hou et al.
  (https://arxiv.org/abs/2607.07508). GLM-5 gives no values; the defaults are wide.

  Args:
    ratio: its base is the policy that sampled.
    inputs: [rows, N].
    delta_low: δ_lo, a distance from 1.
    delta_high: δ_hi, a distance from 1.
  """
  rho = jax.lax.stop_gradient(ratio.ratio_t)
  low, high = rho <= 1.0 - delta_low, rho >= 1.0 + delta_high
  weight = jnp.where(low | high, 0.0, rho)
  loss = -weight * inputs.adv_t * inputs.log_probs_t
  return TokenLoss(loss, inputs.mask_t & low, inputs.mask_t & high)


def squared(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  tau: Annotated[float, Range(0.0)] = 0.1,
  level: Level = 'sequence',
) -> TokenLoss:
  """Policy gradient with a squared log-ratio, of the answer or of each token (Kimi k1.5).

  Σₜ Lₜ = −Â Σₜ log πₜ + (τ/2) (Σₜ log πₜ / π_base,ₜ)²;  'token': the square of each term of the sum

  Divided by: the aggregation's denominator; sequence_sum is the paper's mean over answers. The
  square of an answer is spread evenly over its tokens. Gradient flows through: log_probs_t.
  See "Kimi k1.5", Kimi Team (https://arxiv.org/abs/2501.12599), equation 3.

  Args:
    ratio: its base is the policy that sampled.
    inputs: [rows, N].
    tau: τ.
    level: 'sequence', as the paper, or 'token'.
  """
  square = ratio.log_token_t**2
  if level == 'sequence':
    ids = (inputs.mask_t, inputs.trajectory_t)
    square = segments.run_sum(ratio.log_token_t, *ids) ** 2
    square = square / jnp.maximum(segments.run_size(*ids), 1.0)
  nowhere = jnp.zeros_like(inputs.mask_t)
  loss = -inputs.adv_t * inputs.log_probs_t + 0.5 * tau * square
  return TokenLoss(loss, nowhere, nowhere, {'squared_log_ratio': square})


TABLE = {
  'topr': Box(topr, formula='−sg[min(ρ_{level}, {absolute_high:g}) if A<0 else 1] A log π'),
  'double_sided': Box(
    double_sided,
    formula='−sg[ρ·1[1−{delta_low:g} < ρ < 1+{delta_high:g}]] A log π',
    tags=frozenset({'token_mask'}),
  ),
  'squared': Box(squared, formula='−A log π + ({tau:g}/2) (log ρ_{level})²'),
}
