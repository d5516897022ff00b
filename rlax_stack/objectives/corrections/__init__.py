"""Off-policy corrections: weights that turn an expectation under the behaviour policy into one
under the proximal.

A box: (LossInputs, *, options) -> Correction. Several multiply, in the order given; no gradient
flows through any of them, and what they drop stays in the denominators.
"""

from rlax_stack.objectives.corrections import importance, masks, whole_batch

TABLE = importance.TABLE | masks.TABLE | whole_batch.TABLE
