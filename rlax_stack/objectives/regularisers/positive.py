"""Likelihood of the batch's right answers as a term of the loss.

Not for losses that replace the surrogate (trust_regions/supervised.py). Invariant: wrong answers have
no part in it, not even in its denominator.
"""

from typing import Annotated

import jax.numpy as jnp

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Penalty, Statistics


def positive_tokens(inputs: LossInputs, *, correct_at: float = 0.5) -> Statistics:
  """Trained tokens of the batch's right answers."""
  positive = inputs.mask_t & (inputs.reward_t >= correct_at)
  return Statistics(scalars={'tokens': jnp.sum(positive.astype(jnp.float32))})


def positive_nll(
  inputs: LossInputs,
  *,
  statistics: Statistics,
  coef: Annotated[float, Range(0.0)] = 0.1,
  correct_at: float = 0.5,
) -> Penalty:
  """Makes right answers likelier, whatever their advantage: the positive-example LM loss of VAPO.

  Lₜ = −μ log πₜ where Rᵢ ≥ c, else 0

  Divided by: the trained tokens of the batch's right answers. Gradient flows through: log_probs_t.
  See "VAPO", Yue et al. (https://arxiv.org/abs/2504.05118), section 4.3, μ = 0.1.

  Args:
    inputs: [rows, N].
    statistics: from `positive_tokens`.
    coef: μ.
    correct_at: c, of the reward after shaping.
  """
  positive = inputs.reward_t >= correct_at
  loss = jnp.where(inputs.mask_t & positive, -coef * inputs.log_probs_t, 0.0)
  return Penalty(loss, denominator=statistics.scalars['tokens'], metrics={'positive': positive})


TABLE = {
  'positive_nll': Box(
    positive_nll,
    formula='− {coef:g}·log π of R ≥ {correct_at:g}',
    tags=frozenset({'unscored'}),
    batch_statistics=positive_tokens,
  ),
}
