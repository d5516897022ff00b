"""Reasoning efficiently: right answers pay less when they are long, with the baseline of RLOO.

"Training Language Models to Reason Efficiently", Arora and Zanette
(https://arxiv.org/abs/2502.04463).
Test: tests/unit/objectives/test_group_estimators.py::short_correct
"""

from configs import base


def get_config():
  """The base config with the boxes of efficient reasoning."""
  config = base.get_config()
  config.name = 'reason_efficiently'
  config.objective.shaping = ('short_correct(alpha=0.1)',)
  config.objective.advantage = 'leave_one_out'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
