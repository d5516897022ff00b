"""Lp-Reg: rare words of failures are pulled to the policy without its noise.

"Low-probability Tokens Sustain Exploration in RLVR", Huang et al. (https://arxiv.org/abs/2510.03222).
Values of the scripts of its code, whose clip leaves ratios from 0 to 10 alone.
Test: tests/unit/objectives/test_vocabulary_boxes.py::test_lp_reg
"""

from configs import base


def get_config():
  """The base config with the boxes of Lp-Reg."""
  config = base.get_config()
  config.name = 'lp_reg'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=1.0, delta_high=9.0)'
  config.objective.regularisers = ('lp_reg(coef=1.0, fraction=0.01, min_p=0.02, relative=True)',)
  config.objective.aggregation = 'token_mean'
  return config
