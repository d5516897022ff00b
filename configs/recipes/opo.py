"""OPO: exactly on policy, with the baseline of least variance.

"On-Policy RL with Optimal Reward Baseline", Hao et al. (https://arxiv.org/abs/2505.23585).
Test: tests/unit/objectives/test_group_estimators.py::length_weighted
"""

from configs import base


def get_config():
  """The base config with the boxes of OPO."""
  config = base.get_config()
  config.name = 'opo'
  config.objective.advantage = 'length_weighted'
  config.objective.trust_region = 'reinforce'
  config.objective.aggregation = 'sequence_sum'
  return config
