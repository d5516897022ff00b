"""TEMPO: the advantage of GRPO plus what a branch of the group's prefix tree is worth.

"Exploiting Tree Structure for Credit Assignment in RL Training of LLMs", Tran et al.
(https://arxiv.org/abs/2509.18314).
Test: tests/unit/objectives/test_token_estimators.py::prefix_tree
"""

from configs import base


def get_config():
  """The base config with the boxes of TEMPO."""
  config = base.get_config()
  config.name = 'tempo'
  config.objective.advantage = 'prefix_tree(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.aggregation = 'token_mean'
  return config
