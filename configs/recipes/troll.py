"""TROLL: each token's distribution is projected into a KL ball around that of the batch's start.

"TROLL: Trust Regions improve Reinforcement Learning for Large Language Models", Becker et al.
(https://arxiv.org/abs/2510.03817). At one update per batch nothing has moved and nothing is projected.
Test: tests/unit/objectives/test_projection.py::test_loss_and_gradient
"""

from configs import base


def get_config():
  """The base config with the boxes of TROLL."""
  config = base.get_config()
  config.name = 'troll'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'troll(delta=0.05, coef=1.0, size=64, tail=1e-5)'
  config.objective.aggregation = 'token_mean'
  config.learner.updates_per_batch = 2
  return config
