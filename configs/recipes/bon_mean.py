"""BoN mean: GRPO with the best reward of k samples, on policy.

"The Best of N Worlds", Bagirov et al. (https://arxiv.org/abs/2510.23393), its on-policy baseline of this
name.
Test: tests/unit/objectives/test_group_estimators.py::max_at_k_reward
"""

from configs import base


def get_config():
  """The base config with the boxes of BoN mean."""
  config = base.get_config()
  config.name = 'bon_mean'
  config.objective.shaping = ('max_at_k_reward(k=2)',)
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('kl_anchor(coef=0.01, estimator="k3")',)
  config.objective.aggregation = 'sequence_mean'
  return config
