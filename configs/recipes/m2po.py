"""M2PO: no clip; the largest log-ratios are dropped until their second moment is small.

"Prosperity before Collapse", Zheng et al. (https://arxiv.org/abs/2510.01161).
Test: tests/unit/objectives/test_corrections.py::_m2po
"""

from configs import base


def get_config():
  """The base config with the boxes of M2PO."""
  config = base.get_config()
  config.name = 'm2po'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'none'
  config.objective.corrections = ('second_moment_mask(absolute_high=0.04)',)
  config.objective.aggregation = 'token_mean'
  return config
