"""Entropy of the policy's distributions as a term of the loss.

Not for the metric of the same name, which is always there. Invariant: the gradient is that of the
whole distribution, not of the sampled token.
"""

from typing import Annotated

from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, Penalty


def entropy_bonus(inputs: LossInputs, *, coef: Annotated[float, Range(0.0)] = 0.001) -> Penalty:
  """Rewards entropy.

  Lₜ = −c Hₜ,  Hₜ = −Σᵥ πₜ(v) log πₜ(v)

  Divided by: the trained tokens of the batch. Gradient flows through: entropy_t.
  See "Asynchronous Methods for Deep Reinforcement Learning", Mnih et al.
  (https://arxiv.org/abs/1602.01783).

  Args:
    inputs: [rows, N].
    coef: c.
  """
  return Penalty(-coef * inputs.entropy_t)


TABLE = {
  'entropy_bonus': Box(entropy_bonus, formula='− {coef:g}·H', tags=frozenset({'entropy_gradient'})),
}
