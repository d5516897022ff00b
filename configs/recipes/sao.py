"""SAO: one sample per prompt, a critic in place of the group, a two-sided interval of the direct ratio.

"Single-Rollout Asynchronous Optimization", Hou et al. (https://arxiv.org/abs/2607.07508): two updates
of the critic for one of the policy, its attention frozen, 10 updates of pre-training, returns as
targets, λ by length with α = 1.5. Bounds are those of its reasoning tasks (0.8 and 3 for code).
Here the critic's updates share the targets made at the start of the batch.
Test: tests/unit/learner/test_critic.py::test_one_sample_per_prompt
"""

from configs import base


def get_config():
  """The base config with the boxes of SAO, 128 single samples to a batch."""
  config = base.get_config()
  config.name = 'sao'
  config.rollout.groups_per_step = 128
  config.rollout.group_size = 1
  config.learner.learning_rate = 1e-6
  config.objective.advantage = 'length_adaptive_gae(alpha=1.5)'
  config.objective.critic = (
    'separate(learning_rate=5e-6, updates=2, freeze_attention=True, pretrain_updates=10, '
    'bootstrap=False)'
  )
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'double_sided(delta_low=0.3, delta_high=5.0)'
  config.objective.aggregation = 'token_mean'
  return config
