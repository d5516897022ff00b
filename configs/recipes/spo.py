"""SPO: a parabola around ratio 1 in place of the clip.

"Simple Policy Optimization", Xie et al. (https://arxiv.org/abs/2401.16025).
Test: tests/unit/objectives/test_trust_regions.py::spo
"""

from configs import base


def get_config():
  """The base config with the boxes of SPO."""
  config = base.get_config()
  config.name = 'spo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'spo(delta=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
