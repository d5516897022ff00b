"""W-REINFORCE: wrong answers are pushed away ten times as hard as right ones are pulled.

"The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning", Zhu et al.
(https://arxiv.org/abs/2506.01347).
Test: tests/unit/objectives/test_group_estimators.py::signed
"""

from configs import base


def get_config():
  """The base config with the boxes of W-REINFORCE."""
  config = base.get_config()
  config.name = 'w_reinforce'
  config.objective.advantage = 'signed(positive=0.1, negative=1.0)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
