"""Decoupled PPO without a proximal forward pass: the proximal policy is interpolated by staleness.

"AReaL", Fu et al. (https://arxiv.org/abs/2505.24298); docs/en/algorithms/prox_approx.md of its
repository.
Test: tests/unit/objectives/test_corrections.py::test_log_linear_proximal_policy
"""

from configs import base


def get_config():
  """The base config with the boxes of decoupled PPO with a log-linear proximal policy."""
  config = base.get_config()
  config.name = 'log_linear_ppo'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'token(base="log_linear")'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.corrections = ('token_tis(absolute_high=5.0)',)
  config.objective.aggregation = 'token_mean'
  return config
