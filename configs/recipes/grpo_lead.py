"""GRPO-LEAD: short right answers pay more, wrong ones cost, and rare outcomes weigh more.

"GRPO-LEAD", Zhang and Zuo (https://arxiv.org/abs/2504.09696).
Test: tests/unit/objectives/test_group_estimators.py::difficulty_weighted
"""

from configs import base


def get_config():
  """The base config with the boxes of GRPO-LEAD."""
  config = base.get_config()
  config.name = 'grpo_lead'
  config.objective.shaping = ('length_decay(alpha=0.05, incorrect=-1.0)',)
  config.objective.advantage = (
    'difficulty_weighted(least=0.4, most=1.5, midpoint=0.75, steepness=10.0)'
  )
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
