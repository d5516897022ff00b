"""PKPO: how much a sample raises the best of k.

"Pass@K Policy Optimization", Walder and Karkhanis (https://arxiv.org/abs/2505.15201).
Test: tests/unit/objectives/test_group_estimators.py::max_at_k
"""

from configs import base


def get_config():
  """The base config with the boxes of PKPO."""
  config = base.get_config()
  config.name = 'pkpo'
  config.objective.advantage = 'max_at_k(k=4)'
  config.objective.trust_region = 'reinforce'
  config.objective.aggregation = 'sequence_sum'
  return config
