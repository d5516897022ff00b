"""Reward shaping: what is added to a verifier's reward, and what is left out of the loss.

A box: (RewardBatch, *, options) -> RewardBatch, on the host, before advantages. Invariant: a box
changes `reward`, `steps` or `keep` and nothing else.
"""

from rlax_stack.objectives.shaping import best_of_k, kl, length, overlong, process

TABLE = overlong.TABLE | kl.TABLE | length.TABLE | best_of_k.TABLE | process.TABLE
