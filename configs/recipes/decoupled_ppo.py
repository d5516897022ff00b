"""Decoupled PPO: clipped against the proximal policy, weighed against the behaviour policy.

"AReaL", Fu et al. (https://arxiv.org/abs/2505.24298).
The proximal policy is recomputed at the start of each batch: at one update per batch it is the
current policy, ρ is 1, nothing is clipped, and what is left is −w·A·log π. AReaL makes several
updates of a batch: config.learner.updates_per_batch.
Test: tests/unit/objectives/test_golden_losses.py::decoupled_ppo
"""

from configs import base


def get_config():
  """The base config with the boxes of Decoupled PPO."""
  config = base.get_config()
  config.name = 'decoupled_ppo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.corrections = ('token_tis(absolute_high=5.0)',)
  config.objective.aggregation = 'token_mean'
  return config
