"""R²VPO: the variance of the ratio is held to a bound by a price that follows it.

"Ratio-Variance Regularized Policy Optimization", Luo et al. (https://arxiv.org/abs/2605.26784).
The ratio is against the behaviour policy, so it is the correction too. Its values are ours.
Test: tests/unit/objectives/test_trust_regions.py::test_r2vpo
"""

from configs import base


def get_config():
  """The base config with the boxes of R²VPO."""
  config = base.get_config()
  config.name = 'r2vpo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'r2vpo(delta=0.02, step=1.0, start=1.0)'
  config.objective.corrections = ()
  config.objective.aggregation = 'token_mean'
  config.learner.updates_per_batch = 2
  return config
