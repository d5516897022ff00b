"""Surrogates that read rewards as labels: negative-aware fine-tuning and implicit actor-critic.

Not for advantages: these boxes do not read them. Invariant: what a group says (its rate of success,
the scores of its other answers) is of the whole batch under the current weights.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from rlax_stack.objectives import segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Statistics, TokenLoss
from rlax_stack.objectives.ratios import Ratio

PromptWeight = Literal['equal', 'linear', 'root']

# Rates of success are held inside this interval, as in the authors' code.
_RATE = (0.02, 0.98)


def nft(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  statistics: Statistics,
  correct_at: float = 0.5,
  prompt_weight: PromptWeight = 'linear',
  negative_weight: Annotated[float, Range(0.0)] = 1.0,
  absolute_low: Annotated[float, Range(1e-6)] = 1.0,
) -> TokenLoss:
  """Likelihood of right answers, and of wrong ones under the policy that the right ones leave over.

  right: Lₜ = −ω log ρₜ;  wrong: Lₜ = −ωλ log max⁺((1 − qρₜ) / (1 − q), ε)
  q = the share of right answers of the prompt;  ω = 1 | 1 − q | √((1 − q)/q), 0 where q is 0 or 1

  max⁺ has the gradient of its first argument everywhere. With ω = √((1 − q)/q) and ρ = 1 the
  gradient is that of GRPO.
  Divided by: the aggregation's denominator. Gradient flows through: the ratio.
  See "Bridging Supervised Learning and Reinforcement Learning in Math Reasoning", Chen et al.
  (https://arxiv.org/abs/2505.18116); values of https://github.com/NVlabs/NFT.

  Args:
    ratio: its base is the policy that sampled.
    inputs: [rows, N].
    statistics: from `success_rates`.
    correct_at: rewards of at least this are right answers.
    prompt_weight: 'equal', 'linear' (ω = 1 − q) or 'root' (ω = √((1 − q)/q)).
    negative_weight: λ; 0 is rejection sampling.
    absolute_low: ε, the least ratio of the implicit policy of wrong answers.
  """
  rate, correct = statistics.tokens['rate'], inputs.reward_t >= correct_at
  held = jnp.clip(rate, *_RATE)
  implicit = (1.0 - held * ratio.ratio_t) / (1.0 - held)
  floored = jnp.maximum(implicit, absolute_low)
  implicit_plus = implicit + jax.lax.stop_gradient(floored - implicit)
  loss = jnp.where(correct, -ratio.log_ratio_t, -negative_weight * jnp.log(implicit_plus))
  weight = {
    'equal': jnp.ones_like(held),
    'linear': 1.0 - held,
    'root': jnp.sqrt((1.0 - held) / held),
  }[prompt_weight]
  mixed = inputs.mask_t & (rate > 0.0) & (rate < 1.0)
  return TokenLoss(
    loss_t=jnp.where(mixed, weight * loss, 0.0),
    clipped_low_t=jnp.zeros_like(mixed),
    clipped_high_t=mixed & ~correct & (implicit < absolute_low),
    metrics={'success_rate': rate},
  )


def success_rates(inputs: LossInputs, *, correct_at: float = 0.5) -> Statistics:
  """Share of right answers of each token's prompt.

  Args:
    inputs: [M, rows, N].
    correct_at: see `nft`.

  Returns: tokens 'rate'.
  """
  size, right, _ = _groups(inputs, correct_at)
  return Statistics(tokens={'rate': right / jnp.maximum(size, 1.0)})


def pacs(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  statistics: Statistics,
  beta: Annotated[float, Range(0.0)] = 1.0,
) -> TokenLoss:
  """Classifies answers by a score that the policy itself gives them (implicit actor-critic).

  Lᵢ = −wᵢ [yᵢ log σ(ψᵢ) + (1 − yᵢ) log(1 − σ(ψᵢ))],  ψᵢ = sᵢ − mean of the others of the group
  sᵢ = β Σₜ log πₜ / π_base,ₜ;  y = 1[R ≥ correct_at];  w balances the two classes of a group

  Lᵢ stands at every token of its answer: sequence_mean is the paper's mean over answers.
  Divided by: the aggregation's denominator. Gradient flows through: the scores of all answers of
  the group, each at its own tokens; the slopes are those of the whole batch under the weights that
  scored it.
  See "Implicit Actor Critic Coupling via a Supervised Learning Framework for RLVR", Li et al.
  (https://arxiv.org/abs/2509.02522); values of https://github.com/ritzz-ai/PACS.

  Args:
    ratio: its base is the policy that sampled.
    inputs: [rows, N].
    statistics: from `cross_entropies`.
    beta: β.
    correct_at: rewards of at least this are right answers.
    balanced: False leaves w at 1.
  """
  score = beta * segments.run_sum(ratio.log_token_t, inputs.mask_t, inputs.trajectory_t)
  slope = statistics.tokens['slope'] * (score - jax.lax.stop_gradient(score))
  nowhere = jnp.zeros_like(inputs.mask_t)
  return TokenLoss(statistics.tokens['loss'] + slope, nowhere, nowhere, {'score': score})


def cross_entropies(
  inputs: LossInputs,
  *,
  ratio: Ratio,
  beta: Annotated[float, Range(0.0)] = 1.0,
  correct_at: float = 0.5,
  balanced: bool = True,
) -> Statistics:
  """Losses of `pacs`, and how the loss of a group changes with the score of each of its answers.

  Args:
    inputs: [M, rows, N], under the current weights.
    ratio: of the same tokens.
    beta: see `pacs`, as all that follow.
    correct_at: rewards of at least this are right answers.
    balanced: False leaves w at 1.

  Returns: tokens 'loss' and 'slope', equal at all tokens of an answer.
  """
  size, right, start = _groups(inputs, correct_at)
  label = jnp.where(inputs.reward_t >= correct_at, 1.0, 0.0)
  others = jnp.maximum(size - 1.0, 1.0)

  def of_others(value):
    """Mean over the other answers of the group."""
    total = segments.batch_sum(jnp.where(start, value, 0.0), inputs.mask_t, inputs.group_t)
    return (total - value) / others

  score = beta * segments.run_sum(ratio.log_token_t, inputs.mask_t, inputs.trajectory_t)
  logit = score - of_others(score)
  weight = jnp.ones_like(logit)
  if balanced:
    same = jnp.where(label > 0, right, size - right)
    mixed = (right > 0) & (right < size)
    weight = jnp.where(mixed, size / (2.0 * jnp.maximum(same, 1.0)), 1.0)
  error = weight * (jax.nn.sigmoid(logit) - label)
  loss = weight * (jax.nn.softplus(logit) - label * logit)
  return Statistics(tokens={'loss': loss, 'slope': error - of_others(error)})


def _groups(inputs: LossInputs, correct_at: float) -> tuple[jax.Array, jax.Array, jax.Array]:
  """At every token the answers and the right answers of its group, and where answers start."""
  start = segments.run_start(inputs.mask_t, inputs.trajectory_t)
  right = jnp.where(start & (inputs.reward_t >= correct_at), 1.0, 0.0)
  return (
    segments.batch_sum(start.astype(jnp.float32), inputs.mask_t, inputs.group_t),
    segments.batch_sum(right, inputs.mask_t, inputs.group_t),
    start,
  )


_GROUP = frozenset({'group'})

TABLE = {
  'nft': Box(
    nft,
    formula='−ω log ρ if R ≥ {correct_at:g} else −ω·{negative_weight:g}·log max((1−qρ)/(1−q), '
    '{absolute_low:g}), ω {prompt_weight}',
    tags=_GROUP,
    batch_statistics=success_rates,
  ),
  'pacs': Box(
    pacs,
    formula='balance·BCE(σ(s − mean of the others), R ≥ {correct_at:g}), s = {beta:g}·Σ log ρ',
    tags=_GROUP,
    batch_statistics=cross_entropies,
  ),
}
