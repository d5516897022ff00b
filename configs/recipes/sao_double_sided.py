"""SAO: tokens outside a two-sided interval of the direct ratio are dropped, whatever the sign.

"Single-Rollout Asynchronous Optimization", Hou et al. (https://arxiv.org/abs/2607.07508); without its
critic (that is recipe `sao`), the advantage is that of GLM-5.
Test: tests/unit/objectives/test_trust_regions.py::sao_double_sided
"""

from configs import base


def get_config():
  """The base config with the boxes of SAO's policy loss."""
  config = base.get_config()
  config.name = 'sao_double_sided'
  config.objective.advantage = 'group_center'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'double_sided(delta_low=0.8, delta_high=3.0)'
  config.objective.aggregation = 'token_mean'
  return config
