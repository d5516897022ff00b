"""PURE: an answer is worth its worst step to go, beside the reward of success.

"Stop Summation: Min-Form Credit Assignment Is All Process Reward Model Needs for Reasoning", Cheng et al.
(https://arxiv.org/abs/2504.15275). Its rewards of steps are those of a trained model, from -1 to 1; here a
line of the answer is a step, judged by a rule.
Test: tests/unit/objectives/test_process_rewards.py::test_pure
"""

from ml_collections import ConfigDict

from configs import base


def get_config():
  """The base config with the boxes of PURE."""
  config = base.get_config()
  config.name = 'pure'
  config.rewards.verifiers.steps = ConfigDict(
    {'name': 'step_format', 'pattern': r'\d', 'weight': 1.0}
  )
  config.objective.shaping = ('process_min(temperature=0.1)',)
  config.objective.advantage = 'step_leave_one_out'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
