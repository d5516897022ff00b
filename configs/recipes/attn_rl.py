"""AttnRL: samples branch at the steps that later tokens attend to most, and each node is paid for what it is worth.

"Attention as a Compass: Efficient Exploration for Process-Supervised Reasoning Models"
(https://arxiv.org/abs/2509.26628). Only where branches leave is taken from there; the score is averaged over layers and
heads, and the distance, the advantage (that of TreeRL) and the clip bounds are ours, not checked against the paper. Its
adaptive sampling of problems is not part of this recipe.
Test: tests/unit/rollout/strategies/test_attention_points.py::test_branches_leave_at_the_step_with_most_attention
"""

from configs import base


def get_config():
  """The base config with samples that branch by attention and the boxes of TreeRL."""
  config = base.get_config()
  config.name = 'attn_rl'
  config.rollout.group_size = 16
  config.rollout.strategy = 'tree(roots=4, at="step", by="attention", distance=4)'
  config.objective.advantage = 'tree_nodes()'
  config.objective.aggregation = 'token_mean'
  return config
