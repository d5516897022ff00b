"""PPO with a critic: generalised advantages, clipped ratio and clipped value loss.

"Proximal Policy Optimization", Schulman et al. (https://arxiv.org/abs/1707.06347).
Whitened advantages and the clipped value loss are those of its authors' code (openai/baselines, ppo2),
the critic's learning rate that of verl's examples.
Test: tests/unit/objectives/test_critic_estimators.py::test_gae_is_that_of_the_golden_table
"""

from configs import base


def get_config():
  """The base config with the boxes of PPO."""
  config = base.get_config()
  config.name = 'ppo_critic'
  config.objective.advantage = 'gae(gamma=1.0, lam=0.95, value_lam=0.95, whiten=True)'
  config.objective.critic = 'separate(learning_rate=1e-5, delta_value=0.2)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
