"""REINFORCE++: reward less KL, standardised over all tokens of the batch; no groups.

"REINFORCE++", Hu et al. (https://arxiv.org/abs/2501.03262).
Test: tests/unit/objectives/test_token_estimators.py::reinforce_pp
"""

from configs import base


def get_config():
  """The base config with the boxes of REINFORCE++."""
  config = base.get_config()
  config.name = 'reinforce_pp'
  config.objective.advantage = 'reinforce_pp(gamma=1.0, kl_coef=0.01)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
