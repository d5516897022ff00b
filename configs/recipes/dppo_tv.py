"""DPPO, binary TV: tokens whose probability has moved too far are dropped.

"Rethinking the Trust Region in LLM Reinforcement Learning", Qi et al.
(https://arxiv.org/abs/2602.04879), with the advantage and the norm
of Dr. GRPO, as its authors run it.
Test: tests/unit/objectives/test_trust_regions.py::dppo_tv
"""

from configs import base


def get_config():
  """The base config with the boxes of DPPO with the distance of probabilities."""
  config = base.get_config()
  config.name = 'dppo_tv'
  config.objective.advantage = 'group_center'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'dppo_tv(delta_low=0.15, delta_high=0.15, absolute_high=20.0)'
  config.objective.aggregation = 'constant_norm'
  return config
