"""Advantage estimators: rewards in, one advantage per trajectory or per trained token out.

A box: (RewardBatch, *, options) -> float [B], or a tuple with one float array per trajectory and
one value per trained token; with `host_state` also `state`, and (that, the next state). Numpy, on the
host.
"""

from rlax_stack.objectives.advantages import (
  batch_std,
  best_of_k,
  branches,
  critic,
  flat_groups,
  greedy,
  group,
  minimum_variance,
  off_policy_best_of_k,
  process,
  roles,
  teacher,
  token_std,
  trees,
  weighted,
)

TABLE = (
  group.TABLE
  | batch_std.TABLE
  | token_std.TABLE
  | weighted.TABLE
  | best_of_k.TABLE
  | off_policy_best_of_k.TABLE
  | minimum_variance.TABLE
  | flat_groups.TABLE
  | branches.TABLE
  | greedy.TABLE
  | process.TABLE
  | roles.TABLE
  | trees.TABLE
  | teacher.TABLE
  | critic.TABLE
)
