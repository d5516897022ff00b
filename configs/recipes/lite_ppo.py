"""Lite PPO: mean of the group, standard deviation of the batch, every token counts the same.

"Tricks or Traps? A Deep Dive into RL for LLM Reasoning", Liu et al.
(https://arxiv.org/abs/2508.08221).
Test: tests/unit/objectives/test_golden_losses.py::group_center_batch_std
"""

from configs import base


def get_config():
  """The base config with the boxes of Lite PPO."""
  config = base.get_config()
  config.name = 'lite_ppo'
  config.objective.advantage = 'group_center_batch_std'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
