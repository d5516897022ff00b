"""REINFORCE++-baseline: centred by group, standardised over all tokens of the batch, KL as k2.

"REINFORCE++", Hu et al. (https://arxiv.org/abs/2501.03262).
Test: tests/unit/objectives/test_token_estimators.py::reinforce_pp_baseline
"""

from configs import base


def get_config():
  """The base config with the boxes of REINFORCE++-baseline."""
  config = base.get_config()
  config.name = 'reinforce_pp_baseline'
  config.objective.advantage = 'reinforce_pp_baseline'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('kl_anchor(coef=0.01, estimator="k2")',)
  config.objective.aggregation = 'token_mean'
  return config
