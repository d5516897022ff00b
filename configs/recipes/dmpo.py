"""DMPO: GRPO that also matches the group's distribution over its answers to that of its rewards.

"Beyond Mode Collapse: Distribution Matching for Diverse Reasoning", Li et al.
(https://arxiv.org/abs/2605.19461).
Test: tests/unit/objectives/test_regularisers.py::test_distribution_matching
"""

from configs import base


def get_config():
  """The base config with the boxes of DMPO."""
  config = base.get_config()
  config.name = 'dmpo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('distribution_matching(coef=2.0, temperature=0.0667)',)
  config.objective.aggregation = 'sequence_mean'
  return config
