"""BAPO: clip bounds searched for each batch until positive advantages weigh enough.

"BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs", Xi et al.
(https://arxiv.org/abs/2510.18927).
Test: tests/unit/objectives/test_trust_regions.py::bapo
"""

from configs import base


def get_config():
  """The base config with the boxes of BAPO."""
  config = base.get_config()
  config.name = 'bapo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = (
    'bapo(target=0.5, absolute_low_start=0.6, absolute_low_end=0.9, absolute_low_step=0.05, '
    'absolute_high_start=1.2, absolute_high_end=3.0, absolute_high_step=0.1)'
  )
  config.objective.aggregation = 'token_mean'
  return config
