"""Regularisers: terms that are added to the policy loss, each over a denominator of its own.

A box: (LossInputs, *, options) -> Penalty.
"""

from rlax_stack.objectives.regularisers import (
  controlled_entropy,
  distribution,
  entropy,
  kl,
  low_probability,
  positive,
)

TABLE = (
  kl.TABLE
  | entropy.TABLE
  | controlled_entropy.TABLE
  | low_probability.TABLE
  | distribution.TABLE
  | positive.TABLE
)
