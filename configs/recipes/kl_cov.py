"""KL-Cov: the tokens of the largest covariance are pulled back to the policy that sampled.

"The Entropy Mechanism of Reinforcement Learning", Cui et al. (https://arxiv.org/abs/2505.22617).
Test: tests/unit/objectives/test_trust_regions.py::kl_cov
"""

from configs import base


def get_config():
  """The base config with the boxes of KL-Cov."""
  config = base.get_config()
  config.name = 'kl_cov'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'kl_cov(coef=1.0, fraction=0.0002)'
  config.objective.aggregation = 'token_mean'
  return config
