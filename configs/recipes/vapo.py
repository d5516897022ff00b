"""VAPO: a pre-trained critic, λ by length, clip-higher, and likelihood of right answers.

"VAPO", Yue et al. (https://arxiv.org/abs/2504.05118); value pre-training and two λ from VC-PPO
(https://arxiv.org/abs/2503.01491). Learning rates, α, μ, bounds and 50 updates of pre-training are the
paper's; its batches are 512 prompts of 16 samples. It does not bootstrap cut-off answers.
Test: tests/unit/objectives/test_critic_estimators.py::test_length_adaptive_gae
"""

from configs import base


def get_config():
  """The base config with the boxes of VAPO."""
  config = base.get_config()
  config.name = 'vapo'
  config.rollout.group_size = 16
  config.learner.learning_rate = 1e-6
  config.objective.advantage = 'length_adaptive_gae(alpha=0.05)'
  config.objective.critic = 'separate(learning_rate=2e-6, pretrain_updates=50, bootstrap=False)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.regularisers = ('positive_nll(coef=0.1)',)
  config.objective.aggregation = 'token_mean'
  return config
