"""GSPO: one ratio per sequence, clipped narrowly.

"Group Sequence Policy Optimization", Zheng et al. (https://arxiv.org/abs/2507.18071).
Test: tests/unit/objectives/test_golden_losses.py::gspo
"""

from configs import base


def get_config():
  """The base config with the boxes of GSPO."""
  config = base.get_config()
  config.name = 'gspo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'sequence'
  config.objective.trust_region = 'ppo_clip(delta_low=3e-4, delta_high=4e-4)'
  config.objective.aggregation = 'sequence_mean'
  return config
