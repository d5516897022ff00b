"""TRACE: branches leave the steps, of any tree or the prompt, whose outcome is least settled by a learnt success model.

"TRACE: A Unified Rollout Budget Allocation Framework for Efficient Agentic Reinforcement Learning", Zou et al.
(https://arxiv.org/abs/2606.11119). The budget is that of a group; the features of the model are ours.
Test: tests/unit/rollout/strategies/test_tree.py::test_all_trees_share_branches_where_outcomes_may_differ
"""

from configs import base


def get_config():
  """The base config with the samples and boxes of TRACE."""
  config = base.get_config()
  config.name = 'trace_tree'
  config.rollout.strategy = 'tree(roots=4, rounds=2, at="step", by="mixed")'
  config.objective.advantage = 'tree_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
