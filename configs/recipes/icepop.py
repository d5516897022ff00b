"""IcePop: tokens whose importance weight leaves the bounds are dropped.

"Every Step Evolves", Ling team (https://arxiv.org/abs/2510.18855).
Test: tests/unit/objectives/test_golden_losses.py::icepop
"""

from configs import base


def get_config():
  """The base config with the boxes of IcePop."""
  config = base.get_config()
  config.name = 'icepop'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.corrections = ('icepop(absolute_low=0.5, absolute_high=5.0)',)
  config.objective.aggregation = 'token_mean'
  return config
