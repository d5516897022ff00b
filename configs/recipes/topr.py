"""TOPR: good answers as in supervised training, bad ones with a truncated importance weight.

"Tapered Off-Policy REINFORCE", Le Roux et al. (https://arxiv.org/abs/2503.14286).
Test: tests/unit/objectives/test_trust_regions.py::topr
"""

from configs import base


def get_config():
  """The base config with the boxes of TOPR."""
  config = base.get_config()
  config.name = 'topr'
  config.objective.advantage = 'group_center'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'topr(level="sequence", absolute_high=1.0)'
  config.objective.aggregation = 'sequence_sum'
  return config
