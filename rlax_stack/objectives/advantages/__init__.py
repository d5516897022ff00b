"""Advantage estimators: rewards in, one advantage per trajectory or per trained token out.

A box: (RewardBatch, *, options) -> float [B], or a tuple with one float array per trajectory and
one value per trained token. Numpy, on the host.
"""

from rlax_stack.objectives.advantages import batch_std, group

TABLE = group.TABLE | batch_std.TABLE
