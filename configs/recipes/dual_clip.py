"""Dual-clip PPO: the loss of negative advantages is bounded too.

"Mastering Complex Control in MOBA Games", Ye et al. (https://arxiv.org/abs/1912.09729).
Test: tests/unit/objectives/test_golden_losses.py::dual_clip
"""

from configs import base


def get_config():
  """The base config with the boxes of Dual-clip PPO."""
  config = base.get_config()
  config.name = 'dual_clip'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'dual_clip(delta_low=0.2, delta_high=0.28, absolute_high=3.0)'
  config.objective.aggregation = 'token_mean'
  return config
