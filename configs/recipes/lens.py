"""LENS: wrong answers cost more the likelier they were, so that groups of wrong ones teach too.

"Don't Waste Mistakes", Feng et al. (https://arxiv.org/abs/2510.08696).
Test: tests/unit/objectives/test_token_estimators.py::calibrated_confidence
"""

from configs import base


def get_config():
  """The base config with the boxes of LENS."""
  config = base.get_config()
  config.name = 'lens'
  config.objective.advantage = 'calibrated_confidence(alpha=0.25)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'sequence_mean'
  return config
