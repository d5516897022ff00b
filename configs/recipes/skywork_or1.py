"""Skywork-OR1: an entropy bonus that is steered to hold the entropy above a target.

"Skywork-OR1", He et al. (https://arxiv.org/abs/2505.22312).
Values of the entropy term from its published scripts; the clip is not checked against them.
Test: tests/unit/objectives/test_regularisers.py::test_adaptive_entropy
"""

from configs import base


def get_config():
  """The base config with the boxes of Skywork-OR1."""
  config = base.get_config()
  config.name = 'skywork_or1'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = (
    'adaptive_entropy(target=0.2, step=1e-4, start=0.0, absolute_low=0.0, absolute_high=5e-3)',
  )
  config.objective.aggregation = 'token_mean'
  return config
