"""AgentRL: the advantage of GRPO, standardised over the tokens of each task.

"AgentRL", Zhang et al. (https://arxiv.org/abs/2510.04206), without its sampling from several policies.
Test: tests/unit/objectives/test_token_estimators.py::task_standardised
"""

from configs import base


def get_config():
  """The base config with the boxes of AgentRL."""
  config = base.get_config()
  config.name = 'agent_rl'
  config.objective.shaping = ('truncated_reward(value=-0.2)',)
  config.objective.advantage = 'task_standardised(key="task")'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('kl_anchor(coef=1e-4, estimator="k3")',)
  config.objective.aggregation = 'token_mean'
  return config
