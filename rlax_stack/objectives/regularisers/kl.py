"""KL to an anchor policy, to a teacher or to the behaviour policy, estimated from the sampled tokens.

Not a reward penalty (that is `kl_reward` of the shaping). Invariant: masked tokens are 0 in value
and gradient.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Penalty

Estimator = Literal['k1', 'k2', 'k3', 'k3_plus', 'k3_score', 'k3_is']


def kl_anchor(
  inputs: LossInputs,
  *,
  coef: Annotated[float, Range(0.0)] = 0.001,
  estimator: Estimator = 'k3_plus',
) -> Penalty:
  """KL(π ‖ anchor) as a term of the loss; d = log π − log π_anchor.

  Lₜ = β·kₜ,  k1: d    k2: d²/2    k3: e^(−d) − 1 + d    k3_plus: the value of k3, gradient of k2
  k3_score: π/sg[π] · k3, the same by the score function    k3_is: u·k3,  u = π / π_behaviour

  Divided by: the trained tokens of the batch, whatever the policy loss is divided by.
  Gradient flows through: log_probs_t only. The gradient of k1 has mean zero (useless as a loss),
  that of k3 is biased; that of k2, k3_plus and k3_score, d ∇log π, is the gradient of the KL on
  policy; that of k3_is, u d ∇log π, is it off policy too, at the variance of u.
  See "Approximating KL Divergence", Schulman (http://joschu.net/blog/kl-approx.html); k3_is from
  "DeepSeek-V3.2" (https://arxiv.org/abs/2512.02556), k3_score as in NeMo RL.

  Args:
    inputs: [rows, N].
    coef: β.
    estimator: see above.
  """
  d = ratios.log_ratio(inputs.log_probs_t, inputs.anchor_log_probs_t, inputs.mask_t)
  kl_t = _estimate(d, estimator, inputs)
  return Penalty(coef * kl_t, metrics={'kl_anchor': kl_t})


def kl_teacher(
  inputs: LossInputs,
  *,
  coef: Annotated[float, Range(0.0)] = 1.0,
  estimator: Estimator = 'k2',
) -> Penalty:
  """KL(π ‖ teacher) as a term of the loss, on the policy's own samples: on-policy distillation.

  Lₜ = β·kₜ  of d = log π − log π_teacher, see `kl_anchor`

  Divided by: the trained tokens of the batch. Gradient flows through: log_probs_t only; that of k2,
  d ∇log π, is the gradient of each token's reverse KL on policy, what comes after it left out.
  See "On-Policy Distillation of Language Models", Agarwal et al. (https://arxiv.org/abs/2306.13649)
  and "MiniLLM", Gu et al. (https://arxiv.org/abs/2306.08543).

  Args:
    inputs: [rows, N].
    coef: β.
    estimator: see `kl_anchor`.
  """
  d = ratios.log_ratio(inputs.log_probs_t, inputs.teacher_log_probs_t, inputs.mask_t)
  kl_t = _estimate(d, estimator, inputs)
  return Penalty(coef * kl_t, metrics={'kl_teacher': kl_t})


def kl_behaviour(
  inputs: LossInputs,
  *,
  coef: Annotated[float, Range(0.0)] = 0.002,
  estimator: Estimator = 'k2',
) -> Penalty:
  """KL(π ‖ behaviour) as a term of the loss, also where the surrogate's gradient is cut off.

  Lₜ = β·kₜ  of d = log π − log π_behaviour, see `kl_anchor`;  k2: β d²/2

  Divided by: the trained tokens of the batch. Gradient flows through: log_probs_t only.
  See the squared log-ratio of prime-rl (https://github.com/PrimeIntellect-ai/prime-rl,
  trainer/rl/loss.py), 0.001 d², which is the default.

  Args:
    inputs: [rows, N].
    coef: β.
    estimator: see `kl_anchor`.
  """
  d = ratios.log_ratio(inputs.log_probs_t, inputs.behaviour_log_probs_t, inputs.mask_t)
  return Penalty(coef * _estimate(d, estimator, inputs))


def _estimate(d: jax.Array, estimator: Estimator, inputs: LossInputs) -> jax.Array:
  k2 = 0.5 * d * d
  if estimator == 'k1':
    return d
  if estimator == 'k2':
    return k2
  bounded = jnp.clip(d, -ratios.MAX_LOG_RATIO, ratios.MAX_LOG_RATIO)
  k3 = jnp.expm1(-bounded) + d
  if estimator == 'k3':
    return k3
  if estimator == 'k3_plus':
    return k2 + jax.lax.stop_gradient(k3 - k2)
  base = inputs.behaviour_log_probs_t if estimator == 'k3_is' else inputs.log_probs_t
  return ratios.exp(ratios.log_ratio(inputs.log_probs_t, base, inputs.mask_t)) * k3


TABLE = {
  'kl_anchor': Box(
    kl_anchor, formula='+ {coef:g}·KL(π‖anchor; {estimator})', tags=frozenset({'anchor'})
  ),
  'kl_teacher': Box(
    kl_teacher, formula='+ {coef:g}·KL(π‖teacher; {estimator})', tags=frozenset({'teacher'})
  ),
  'kl_behaviour': Box(
    kl_behaviour,
    formula='+ {coef:g}·KL(π‖behaviour; {estimator})',
    tags=frozenset({'behaviour'}),
  ),
}
