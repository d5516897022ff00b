"""Dr.GRPO: no standard deviation and no division by length.

"Understanding R1-Zero-Like Training", Liu et al. (https://arxiv.org/abs/2503.20783).
Test: tests/unit/objectives/test_golden_losses.py::dr_grpo
"""

from configs import base


def get_config():
  """The base config with the boxes of Dr.GRPO."""
  config = base.get_config()
  config.name = 'dr_grpo'
  config.objective.advantage = 'group_center'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'constant_norm'
  return config
