"""GPG: the policy gradient alone, divided by the samples that say something.

"GPG", Chu et al. (https://arxiv.org/abs/2504.02546).
Test: tests/unit/objectives/test_group_estimators.py::useful_share
"""

from configs import base


def get_config():
  """The base config with the boxes of GPG."""
  config = base.get_config()
  config.name = 'gpg'
  config.objective.advantage = 'useful_share'
  config.objective.trust_region = 'reinforce'
  config.objective.aggregation = 'prompt_mean'
  return config
