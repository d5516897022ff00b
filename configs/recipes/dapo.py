"""DAPO: a higher upper bound, every token counts the same, long answers are penalised.

"DAPO", Yu et al. (https://arxiv.org/abs/2503.14476).
Test: tests/unit/objectives/test_golden_losses.py::dapo
"""

from configs import base


def get_config():
  """The base config with the boxes of DAPO."""
  config = base.get_config()
  config.name = 'dapo'
  config.objective.shaping = ('overlong_penalty(buffer_fraction=0.2, penalty=1.0)',)
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.aggregation = 'token_mean'
  return config
