"""CISPO: the importance weight is clipped, not the gradient.

"MiniMax-M1" (https://arxiv.org/abs/2506.13585).
Test: tests/unit/objectives/test_golden_losses.py::cispo
"""

from configs import base


def get_config():
  """The base config with the boxes of CISPO."""
  config = base.get_config()
  config.name = 'cispo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'cispo(delta_low=1.0, delta_high=0.28)'
  config.objective.aggregation = 'token_mean'
  return config
