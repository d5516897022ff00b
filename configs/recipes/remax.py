"""ReMax: REINFORCE with the reward of the greedy answer as baseline; one sample a prompt is enough.

"ReMax", Li et al. (https://arxiv.org/abs/2310.10505).
Test: tests/unit/objectives/test_process_rewards.py::test_remax
"""

from configs import base


def get_config():
  """The base config with the boxes of ReMax, and one sample for each of as many prompts."""
  config = base.get_config()
  config.name = 'remax'
  config.rollout.groups_per_step = 64
  config.rollout.group_size = 1
  config.objective.advantage = 'greedy_baseline'
  config.objective.trust_region = 'reinforce'
  config.objective.aggregation = 'sequence_sum'
  return config
