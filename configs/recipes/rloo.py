"""RLOO: REINFORCE with the mean of the other samples as baseline.

"Back to Basics", Ahmadian et al. (https://arxiv.org/abs/2402.14740).
Test: tests/unit/objectives/test_golden_losses.py::rloo
"""

from configs import base


def get_config():
  """The base config with the boxes of RLOO."""
  config = base.get_config()
  config.name = 'rloo'
  config.objective.advantage = 'leave_one_out'
  config.objective.trust_region = 'reinforce'
  config.objective.aggregation = 'sequence_sum'
  return config
