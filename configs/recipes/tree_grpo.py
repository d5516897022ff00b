"""Tree-GRPO: samples branch at random steps and are compared within their tree and within their group.

"Tree Search for LLM Agent Reinforcement Learning", Ji et al. (https://arxiv.org/abs/2509.21240). Its
steps are an agent's turns; here a step of the answer ends with a blank line.
Test: tests/unit/objectives/test_trees.py::test_tree_std
"""

from configs import base


def get_config():
  """The base config with the samples and boxes of Tree-GRPO."""
  config = base.get_config()
  config.name = 'tree_grpo'
  config.rollout.strategy = 'tree(roots=2, rounds=2, at="step", by="random")'
  config.objective.advantage = 'tree_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('kl_anchor(coef=0.001, estimator="k3")',)
  config.objective.aggregation = 'sequence_mean'
  return config
