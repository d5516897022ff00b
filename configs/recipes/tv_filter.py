"""TV filter: far from behaviour, tokens that would move further away are dropped.

"Align and Filter", Honari et al. (https://arxiv.org/abs/2603.01365).
Only its filter, in the form of open-instruct; its realigned advantages need a critic. The value of
delta is ours.
Test: tests/unit/objectives/test_corrections.py::_tv
"""

from configs import base


def get_config():
  """The base config with the boxes of the filter of VACO."""
  config = base.get_config()
  config.name = 'tv_filter'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.corrections = ('token_tis(absolute_high=2.0)', 'tv_mask(delta=0.2)')
  config.objective.aggregation = 'token_mean'
  return config
