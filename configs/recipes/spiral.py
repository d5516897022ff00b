"""SPIRAL: each role in each game is compared with its own running mean; no group is needed.

"SPIRAL", Liu et al. (https://arxiv.org/abs/2506.24119). Games and roles are those of trajectories with
several agents, or of the prompts' metadata.
Test: tests/unit/objectives/test_roles.py::test_spiral
"""

from configs import base


def get_config():
  """The base config with the boxes of SPIRAL, and one sample for each of as many prompts."""
  config = base.get_config()
  config.name = 'spiral'
  config.rollout.groups_per_step = 64
  config.rollout.group_size = 1
  config.objective.advantage = 'role_baseline(decay=0.95, game_key="task", role_key="role")'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
