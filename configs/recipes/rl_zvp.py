"""RL-ZVP: groups of equal rewards are trained on too, by the entropy of their tokens.

"No Prompt Left Behind", Le et al. (https://arxiv.org/abs/2509.21880).
Test: tests/unit/objectives/test_token_estimators.py::flat_entropy
"""

from configs import base


def get_config():
  """The base config with the boxes of RL-ZVP."""
  config = base.get_config()
  config.name = 'rl_zvp'
  config.objective.advantage = 'flat_entropy(alpha=0.1)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
