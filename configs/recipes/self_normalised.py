"""Self-normalised importance sampling: truncated weights, divided by their mean over the batch.

Rollout correction of verl (https://github.com/volcengine/verl), docs/algo/rollout_corr.md.
Test: tests/unit/objectives/test_corrections.py::_normalised_tokens
"""

from configs import base


def get_config():
  """The base config with the boxes of self-normalised importance sampling."""
  config = base.get_config()
  config.name = 'self_normalised'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.corrections = ('self_normalised_tis(absolute_high=2.0, level="token")',)
  config.objective.aggregation = 'token_mean'
  return config
