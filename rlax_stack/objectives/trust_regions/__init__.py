"""Trust regions: a log-ratio and an advantage in, a loss per token out.

A box: (Ratio, LossInputs, *, options) -> TokenLoss. Losses that replace the surrogate are boxes of
this slot too; a loss of a sequence is spread over its tokens.
"""

from rlax_stack.objectives.trust_regions import (
  balanced,
  clip,
  covariance,
  divergence,
  projection,
  soft,
  supervised,
  weighted,
)

TABLE = (
  clip.TABLE
  | soft.TABLE
  | weighted.TABLE
  | divergence.TABLE
  | projection.TABLE
  | covariance.TABLE
  | balanced.TABLE
  | supervised.TABLE
)
