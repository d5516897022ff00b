"""RLOO with the KL to the start in the reward.

"Back to Basics", Ahmadian et al. (https://arxiv.org/abs/2402.14740).
The coefficient is the default of TRL.
Test: tests/unit/objectives/test_regularisers.py::test_kl_reward
"""

from configs import base


def get_config():
  """The base config with the boxes of RLOO with a KL penalty."""
  config = base.get_config()
  config.name = 'rloo_kl'
  config.objective.shaping = ('kl_reward(coef=0.05)',)
  config.objective.advantage = 'leave_one_out'
  config.objective.trust_region = 'reinforce'
  config.objective.aggregation = 'sequence_sum'
  return config
