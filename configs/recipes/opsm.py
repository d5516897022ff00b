"""OPSM: failures that the policy has moved away from are dropped; KL unbiased off policy too.

"DeepSeek-V3.2" (https://arxiv.org/abs/2512.02556).
The paper gives no value of δ and β; the bound of token_tis is ours.
Test: tests/unit/objectives/test_corrections.py::_opsm
"""

from configs import base


def get_config():
  """The base config with the boxes of off-policy sequence masking and the weighted KL."""
  config = base.get_config()
  config.name = 'opsm'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.corrections = ('opsm(delta_log_high=0.5)', 'token_tis(absolute_high=2.0)')
  config.objective.regularisers = ('kl_anchor(coef=0.001, estimator="k3_is")',)
  config.objective.aggregation = 'token_mean'
  return config
