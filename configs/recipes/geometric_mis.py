"""Geometric masking: sequences whose mean log-weight leaves the bounds are dropped.

"When Speed Kills Stability", Liu et al., part 3 (https://richardli.xyz/rl-collapse-3).
The bounds are wide, for stale samples; against the mismatch of engines alone verl takes 0.999 and
1.001.
Test: tests/unit/objectives/test_corrections.py::_geometric
"""

from configs import base


def get_config():
  """The base config with the boxes of geometric masked importance sampling."""
  config = base.get_config()
  config.name = 'geometric_mis'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.corrections = (
    'geometric_mask(absolute_low=0.5, absolute_high=2.0)',
    'token_tis(absolute_high=2.0)',
  )
  config.objective.aggregation = 'token_mean'
  return config
