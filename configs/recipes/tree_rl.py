"""TreeRL: samples branch at their most surprising tokens, and each node is paid for what it is worth.

"TreeRL: LLM Reinforcement Learning with On-Policy Tree Search", Hou et al.
(https://arxiv.org/abs/2506.11902). Clip bounds of the base config, not checked against the paper.
Test: tests/unit/objectives/test_trees.py::test_tree_nodes
"""

from configs import base


def get_config():
  """The base config with the samples and boxes of TreeRL."""
  config = base.get_config()
  config.name = 'tree_rl'
  config.rollout.group_size = 16
  config.rollout.strategy = 'tree(roots=4, rounds=1, at="token", by="surprisal", per_point=1)'
  config.objective.advantage = 'tree_nodes()'
  config.objective.aggregation = 'token_mean'
  return config
