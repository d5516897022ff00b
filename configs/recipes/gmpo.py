"""GMPO: the geometric mean of ratios that are clipped one by one in log space.

"Geometric-Mean Policy Optimization", Zhao et al. (https://arxiv.org/abs/2507.20673).
Test: tests/unit/objectives/test_golden_losses.py::gmpo
"""

from configs import base


def get_config():
  """The base config with the boxes of GMPO."""
  config = base.get_config()
  config.name = 'gmpo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'geometric_mean'
  config.objective.trust_region = 'log_clip(delta_log_low=0.4, delta_log_high=0.4)'
  config.objective.aggregation = 'sequence_mean'
  return config
