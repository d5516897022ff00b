"""SAPO: a soft gate in place of the clip.

"Soft Adaptive Policy Optimization", Gao et al. (https://arxiv.org/abs/2511.20347).
Test: tests/unit/objectives/test_trust_regions.py::sapo
"""

from configs import base


def get_config():
  """The base config with the boxes of SAPO."""
  config = base.get_config()
  config.name = 'sapo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'sapo(tau_positive=1.0, tau_negative=1.05)'
  config.objective.aggregation = 'sequence_mean'
  return config
