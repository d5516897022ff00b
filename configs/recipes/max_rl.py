"""MaxRL: centred rewards over the mean of the group, so that hard prompts count more.

"Maximum Likelihood Reinforcement Learning", Tajwar et al. (https://arxiv.org/abs/2602.02710).
Test: tests/unit/objectives/test_group_estimators.py::max_rl
"""

from configs import base


def get_config():
  """The base config with the boxes of MaxRL."""
  config = base.get_config()
  config.name = 'max_rl'
  config.objective.advantage = 'max_rl'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
