"""Pass@k training: GRPO over sets of k samples that pass when one of them does.

"Pass@k Training", Chen et al. (https://arxiv.org/abs/2508.10751).
Test: tests/unit/objectives/test_group_estimators.py::pass_at_k
"""

from configs import base


def get_config():
  """The base config with the boxes of Pass@k training."""
  config = base.get_config()
  config.name = 'pass_at_k'
  config.objective.advantage = 'pass_at_k(k=2)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.aggregation = 'token_mean'
  return config
