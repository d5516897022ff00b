"""Clip-Cov: a random few of the tokens of high covariance lose their gradient.

"The Entropy Mechanism of Reinforcement Learning", Cui et al. (https://arxiv.org/abs/2505.22617).
Test: tests/unit/objectives/test_trust_regions.py::clip_cov
"""

from configs import base


def get_config():
  """The base config with the boxes of Clip-Cov."""
  config = base.get_config()
  config.name = 'clip_cov'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = (
    'clip_cov(delta_low=0.2, delta_high=0.2, fraction=0.0002, absolute_low=1.0, absolute_high=5.0)'
  )
  config.objective.aggregation = 'token_mean'
  return config
