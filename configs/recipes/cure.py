"""CURE, first stage: samples are drawn anew from their tokens of highest entropy, and all are trained on.

"CURE: Critical-Token-Guided Re-Concatenation for Entropy-Collapse Prevention", Li et al.
(https://arxiv.org/abs/2508.11016). The second stage is the recipe dapo, started from its checkpoint.
Test: tests/unit/rollout/strategies/test_tree.py::test_branches_leave_at_the_highest_entropy
"""

from configs import base


def get_config():
  """The base config with the samples and boxes of the first stage of CURE."""
  config = base.get_config()
  config.name = 'cure'
  config.rollout.strategy = 'tree(roots=4, at="token", by="entropy", trains="own")'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.aggregation = 'token_mean'
  return config
