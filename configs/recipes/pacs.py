"""PACS: the policy classifies its own answers as right or wrong.

"Implicit Actor Critic Coupling via a Supervised Learning Framework for RLVR", Li et al.
(https://arxiv.org/abs/2509.02522).
Test: tests/unit/objectives/test_supervised.py::pacs
"""

from configs import base


def get_config():
  """The base config with the boxes of PACS; the advantage is not read."""
  config = base.get_config()
  config.name = 'pacs'
  config.objective.advantage = 'group_center'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'pacs(beta=1.0, correct_at=0.5, balanced=True)'
  config.objective.aggregation = 'sequence_mean'
  return config
