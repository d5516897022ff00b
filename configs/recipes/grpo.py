"""GRPO: advantages over the group's standard deviation, clipped ratio, KL to the start.

"DeepSeekMath", Shao et al. (https://arxiv.org/abs/2402.03300).
Test: tests/unit/objectives/test_golden_losses.py::grpo
"""

from configs import base


def get_config():
  """The base config with the boxes of GRPO."""
  config = base.get_config()
  config.name = 'grpo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('kl_anchor(coef=0.04, estimator="k3")',)
  config.objective.aggregation = 'sequence_mean'
  return config
