"""AT-GRPO: a group for every agent and turn, each turn with what it and what the team got.

"Stronger-MAS", Zhao et al. (https://arxiv.org/abs/2510.11062). With one agent and one turn it is GRPO;
drawing the samples of a turn anew from the best one before is no part of the objective.
Test: tests/unit/objectives/test_roles.py::test_at_grpo
"""

from configs import base


def get_config():
  """The base config with the boxes of AT-GRPO."""
  config = base.get_config()
  config.name = 'at_grpo'
  config.objective.advantage = 'agent_turn_std(alpha=1.0, ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'sequence_mean'
  return config
