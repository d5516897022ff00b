"""Kimi k1.5: policy gradient with the squared log-ratio of the answer.

"Kimi k1.5", Kimi Team (https://arxiv.org/abs/2501.12599); the report gives no value of tau.
Test: tests/unit/objectives/test_trust_regions.py::kimi_k1_5
"""

from configs import base


def get_config():
  """The base config with the boxes of Kimi k1.5."""
  config = base.get_config()
  config.name = 'kimi_k1_5'
  config.objective.advantage = 'group_center'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'squared(tau=0.1, level="sequence")'
  config.objective.aggregation = 'sequence_sum'
  return config
